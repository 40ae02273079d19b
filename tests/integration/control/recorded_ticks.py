"""A Celery program for tests: the product's application, with a learn tick that writes a line for each call."""

import os
from pathlib import Path

from app.celery_app import LEARN_TICK, celery_app


@celery_app.task(name=LEARN_TICK)
def record() -> None:
    with Path(os.environ["TICKS"]).open("a") as file:
        file.write("tick\n")
