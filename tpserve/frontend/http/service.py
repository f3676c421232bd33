"""What the routes need."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from tpserve.board import Board
from tpserve.deployment import Deployment
from tpserve.frontend import health
from tpserve.frontend.chat.message_format import MessageFormat
from tpserve.frontend.compiler.checker import GrammarChecker
from tpserve.frontend.engine import Engine
from tpserve.frontend.metrics import Metrics
from tpserve.frontend.prompts import PromptMaker


@dataclass(frozen=True)
class Service:
    """Made once, and shared by all requests."""

    deployment: Deployment
    board: Board
    engine: Engine
    metrics: Metrics
    prompts: PromptMaker
    form: MessageFormat
    grammars: GrammarChecker
    executor: Executor  # where bodies become prompts

    def health(self) -> health.Health:
        """The state now."""
        return health.check(self.board, self.engine, self.deployment.settings.step_timeout)
