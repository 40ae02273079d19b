"""Wake-ups that nobody took are dropped, on every broker."""

from pathlib import Path

import pytest

from app.broker.backlog import LIMIT, trim_backlog
from app.celery_app import LEARN_TICK, create_celery_app
from app.settings import Settings
from tests.integration.control.processes import need_server
from tests.integration.control.test_ticks import BROKERS, PORTS


@pytest.mark.parametrize("broker", BROKERS)
def test_a_queue_beyond_the_limit_is_emptied(broker: str, tmp_path: Path) -> None:
    if broker in PORTS:
        need_server(broker, PORTS[broker])
    app = create_celery_app(Settings(home=tmp_path, BROKER_URL=BROKERS[broker]))
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
