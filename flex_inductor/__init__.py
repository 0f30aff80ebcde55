"""flex_inductor: a torch.compile backend for attention written as a score_mod and a mask_mod."""

__version__ = "0.1.0"
