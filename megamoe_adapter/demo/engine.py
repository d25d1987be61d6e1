"""The engine process of the demo; without `serve`, it is the process that cold-loads checkpoints for comparison.

python -m megamoe_adapter.demo.engine        # then one request per line, see `Engine`
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import weightsync
from megamoe_adapter.demo.checkpoint import load_config, read_checkpoint
from megamoe_adapter.demo.child import ParentLink
from megamoe_adapter.experts import MegaMoEExperts
from megamoe_adapter.models.causal_lm import MegaMoEDrafter, MegaMoEForCausalLM, draft_greedy, generate_greedy
from megamoe_adapter.models.loading import cold_load
from weightsync.worker.server import BackgroundServer

NUM_PROMPTS = 4
_PROMPT_TOKENS = 8
_NEW_TOKENS = 8


class Engine:
    """What the engine process does."""

    def __init__(self) -> None:
        self._targets: dict[str, Any] = {}
        self._server: BackgroundServer | None = None
        self._receiver: weightsync.Receiver | None = None

    def requests(self) -> dict[str, Callable[..., object]]:
        """Its requests by name."""
        return {
            "load": self.load,
            "serve": self.serve,
            "zero_experts": self.zero_experts,
            "fingerprint": self.fingerprint,
            "generate": self.generate,
        }

    def load(self, checkpoint: str) -> None:
        """Builds both models afresh and cold-loads them.

        Raises:
            RuntimeError: The engine serves already: whoever holds its models would keep the old ones.
        """
        if self._receiver is not None:
            raise RuntimeError("this engine serves; weights come by push now")
        directory = Path(checkpoint)
        config = load_config(directory)
        targets = {"model": MegaMoEForCausalLM(config), "draft": MegaMoEDrafter(config)}
        for target in targets.values():
            weightsync.record_layouts(target)
            cold_load(target, read_checkpoint(directory))
        self._targets = targets

    def serve(self) -> str:
        """Lets trainers in from now on; returns the URL."""
        self._receiver = weightsync.Receiver(self._targets)
        self._server = BackgroundServer(self._receiver)
        return self._server.url

    def zero_experts(self, part: str) -> int:
        """Sets every byte of a target's expert weights and scales to zero; returns the number of tensors."""
        experts = [module for module in self._targets[part].modules() if isinstance(module, MegaMoEExperts)]
        tensors = [tensor for module in experts for tensor in module.parameters()]
        for tensor in tensors:
            tensor.data.zero_()
        return len(tensors)

    def fingerprint(self, part: str) -> str:
        """Address, layout and digest of every tensor of a target, as JSON."""
        text: str = weightsync.fingerprint(self._targets[part]).to_json()
        return text

    def generate(self, part: str) -> list[list[int]]:
        """What the model says to each prompt, or what the drafter guesses along that text."""
        model: MegaMoEForCausalLM = self._targets["model"]
        prompts = torch.randint(
            model.config.vocab_size, (NUM_PROMPTS, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(1)
        )
        with nullcontext() if self._receiver is None else self._receiver.serving():
            answers = generate_greedy(model, prompts, _NEW_TOKENS)
            if part == "draft":
                answers = draft_greedy(model, self._targets["draft"], torch.cat([prompts, answers], dim=1))
        return [[int(token) for token in answer] for answer in answers]

    def close(self) -> None:
        """Stops serving."""
        if self._server is not None:
            self._server.close()
        if self._receiver is not None:
            self._receiver.close()


def main() -> None:
    """Answers requests until stdin ends."""
    link = ParentLink()
    engine = Engine()
    try:
        link.answer_requests(engine.requests())
    finally:
        engine.close()


if __name__ == "__main__":
    main()
