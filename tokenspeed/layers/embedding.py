"""Both ends of a decoder: the token table and the head that scores the vocabulary; tied, they are one tensor."""

from __future__ import annotations

import torch

from tokenspeed.config.model import ModelConfig
from tokenspeed.distributed.collectives import all_reduce
from tokenspeed.distributed.mesh import Mesh
from tokenspeed.kernels.ops import Ops
from tokenspeed.layers.entry import Entries, Entry, read_exact
from tokenspeed.protocol.errors import CheckpointError, ConfigError
from tokenspeed.quantization.interface import LinearShape, Scheme, WeightTensor


class Vocabulary:
    """`embed` [V, H] and `head` [V, H].

    Tied (`config.tie_word_embeddings`): the head's method loads the table, and lookups read the dense copy that the
    method keeps; a block-quantized table is so stored once dense and once packed, as every other layer.
    Untied: the table is dense in the model's dtype (a lookup reads a few rows), the head is a linear of the scheme.

    Args:
        embed_name, head_name: HF names without `.weight`.
    """

    def __init__(
        self, config: ModelConfig, mesh: Mesh, scheme: Scheme, ops: Ops, embed_name: str, head_name: str
    ) -> None:
        all_reduce(mesh.tp)  # a table sharded over ranks would need one; refuses a mesh of more than one rank
        self._shape = (config.vocab_size, config.hidden_size)
        self._ops = ops
        self._tied = config.tie_word_embeddings
        self._embed_name = embed_name
        self._head_name = head_name
        head_prefix = embed_name if self._tied else head_name
        self._scheme_name = scheme.name
        self._head = scheme.declare(LinearShape(config.hidden_size, config.vocab_size, False, head_prefix))
        self._table: torch.Tensor | None = None

    def entries(self) -> Entries:
        embed, head = f"{self._embed_name}.weight", f"{self._head_name}.weight"
        head_entry = Entry(self._shape, lambda weight: self._head.load(weight, 0, None, None))
        if self._tied:
            return {embed: head_entry}
        return {embed: Entry(self._shape, self._load_table), head: head_entry}

    def ignorable(self, name: str) -> bool:
        """True for a head in the checkpoint of a tied model: a copy of the table."""
        return self._tied and name == f"{self._head_name}.weight"

    def finish(self) -> None:
        """
        Raises:
            CheckpointError: a tensor never came.
            ConfigError: the scheme keeps no dense copy that a tied table could be read from.
        """
        self._head.finish()
        if self._tied:
            if self._head.dense is None:
                raise ConfigError(f"the {self._scheme_name} scheme cannot store a head tied to the token table")
            self._table = self._head.dense
        if self._table is None:
            raise CheckpointError(f"{self._embed_name}.weight was not in the checkpoint")

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] int64 -> [T, H], a new tensor."""
        assert self._table is not None, "used before finish"
        return self._ops.embedding(token_ids, self._table)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] -> scores [N, V] in the dtype of hidden."""
        return self._head.apply(hidden)

    def _load_table(self, weight: WeightTensor) -> None:
        self._table = read_exact(weight, self._shape, self._ops)
