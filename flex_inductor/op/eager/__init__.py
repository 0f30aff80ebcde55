"""The op without torch.compile: operations in chunks, a kernel for a class of calls, the short way of known calls."""
