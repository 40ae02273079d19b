"""Wake-ups that pile up while nobody takes them: they are worth nothing, whatever the broker."""

from celery import Celery

LIMIT = 300


def trim_backlog(app: Celery) -> int:
    """Empty every queue that holds more than LIMIT messages. Returns how many were dropped."""
    dropped = 0
    with app.connection_for_write() as connection, connection.channel() as channel:
        for queue in app.conf.task_queues:
            bound = queue.bind(channel)
            if bound.queue_declare().message_count > LIMIT:
                dropped += bound.purge()
    return dropped
