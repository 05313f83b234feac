"""Errors of the training commands: one line on the terminal, exit code 2, nothing written."""

from __future__ import annotations


class TrainingRefused(Exception):
    """{detail}"""


class BadTraffic(TrainingRefused):
    """{file}, line {line}: {problem}"""


class TooLittleTraffic(TrainingRefused):
    """{file} has {given} requests; distillation needs at least {needed}, fewer can make a draft worse"""


class BadModelDirectory(TrainingRefused):
    """{role} directory {directory}: {problem}"""


class ModelsDoNotFit(TrainingRefused):
    """The draft in {draft} does not fit the target in {target}: {problem}"""


class OutputExists(TrainingRefused):
    """--output {directory} already exists; name a new directory"""


class TrainingDiverged(TrainingRefused):
    """the loss is {loss} at step {step}: the training diverged"""
