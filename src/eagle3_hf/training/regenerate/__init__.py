"""On-policy data: the target answers the prompts of a dataset itself (`eagle3-hf regenerate`)."""

from .dialogue import Dialogue, TemperatureMix, dialogues_of
from .local import LocalAnswers
from .run import regenerate
from .server import ServerAnswers
from .store import AnswerStore

__all__ = [
    "AnswerStore",
    "Dialogue",
    "LocalAnswers",
    "ServerAnswers",
    "TemperatureMix",
    "dialogues_of",
    "regenerate",
]
