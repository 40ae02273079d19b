"""Wake-ups that nobody took are dropped, on every broker."""

from pathlib import Path

from app.broker.backlog import LIMIT, trim_backlog
from app.celery_app import LEARN_TICK, create_celery_app
from app.settings import Settings


def test_a_queue_beyond_the_limit_is_emptied(broker_url: str, tmp_path: Path) -> None:
    app = create_celery_app(Settings(home=tmp_path, BROKER_URL=broker_url))
    with app.connection_for_write() as connection, connection.channel() as channel:
        learn = next(queue for queue in app.conf.task_queues if queue.name == "learn").bind(channel)
        learn.declare()
        learn.purge()
        for _ in range(LIMIT):
            app.send_task(LEARN_TICK, queue="learn")
        assert trim_backlog(app) == 0
        app.send_task(LEARN_TICK, queue="learn")
        assert trim_backlog(app) == LIMIT + 1
        assert learn.queue_declare().message_count == 0
