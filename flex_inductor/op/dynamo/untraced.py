"""Functions that Dynamo runs, as tracing them would take a hundred times as long."""

from __future__ import annotations

from torch import Tensor
from torch._dynamo.variables.higher_order_ops import TorchHigherOrderOperatorVariable, add_hop_context
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ... import compat, errors
from ..hop import untraced
from .known import Known, Unknown, example_of
from .refusals import check, refuse


@add_hop_context
class UntracedVariable(TorchHigherOrderOperatorVariable):
    """Runs a function on what Dynamo knows of its arguments, and traces it where that is not enough.

    Heads and head dims of the query, key and value that it begins with become constants: kernels are made for them.
    """

    _HOP_NAME = "flex_inductor.op.untraced"

    def _call_function(self, tx, args, kwargs):
        function, *given = args
        for example in map(example_of, given[:3]):
            if isinstance(example, Tensor) and not example.is_nested and example.dim() == 4:
                int(example.size(1)), int(example.size(3))
        run, known = function.as_python_constant(), Known(tx)
        try:
            return known.variable(run(*map(known.value, given)))
        except errors.FlexError as error:
            with tx.fake_mode:
                check(tx, run, *map(Known(tx, symbols=False).value, given))
            refuse(tx, error)
        except (Unknown, GuardOnDataDependentSymNode):
            return function.call_function(tx, given, {})


compat.register_dynamo_variable(untraced, UntracedVariable)
