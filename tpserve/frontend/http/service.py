"""What the routes need."""

from __future__ import annotations

from dataclasses import dataclass

from tpserve.board import Board
from tpserve.deployment import Deployment
from tpserve.frontend import health
from tpserve.frontend.chat.message_format import MessageFormat
from tpserve.frontend.compiler.checker import GrammarChecker
from tpserve.frontend.engine import Engine
from tpserve.frontend.http.threads import BodyThreads
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
    format: MessageFormat
    grammars: GrammarChecker
    threads: BodyThreads

    def health(self) -> health.Health:
        """The state now."""
        return health.check(self.board, self.engine, self.deployment.settings.step_timeout)
