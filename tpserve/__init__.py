"""tpserve: tensor-parallel serving of a language model by N worker processes. Importing it does not import torch."""

__version__ = "0.1.0"
