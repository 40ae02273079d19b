"""The live service: `uvicorn --factory app.main:create_app`. What a stop cuts short is logged as aborted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI

from app import handlers, health, metrics
from app.admin import endpoints as admin
from app.auth import KeyCache
from app.db.repositories.policies import list_policies
from app.feedback import endpoints as feedback
from app.inference import endpoints as inference
from app.inference.base_model import ModelUnreadable
from app.service import Service
from app.settings import Settings, get_settings

log = structlog.get_logger(__name__)


def create_app(settings: Settings | None = None) -> FastAPI:
    """The ASGI application. Its lifespan opens the database (migrating it if need be) and closes it after draining."""
    chosen = settings or get_settings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = Service(chosen)
        await asyncio.to_thread(service.database.upgrade)
        service.writer.start()
        app.state.service = service
        app.state.keys = KeyCache()
        app.state.figures = metrics.RecentFigures()
        try:
            await _load_renderers(service)
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="Evergreen",
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from a CDN; /openapi.json has the facts
        redoc_url=None,
        redirect_slashes=False,
    )
    handlers.install(app)
    app.add_middleware(metrics.CountRequests)
    for router in (inference.router, feedback.router, *admin.ROUTERS, health.router, metrics.router):
        app.include_router(router)
    return app


async def _load_renderers(service: Service) -> None:
    """Before the first request, so that none waits for it. A model that cannot be read (yet) holds up no other: it is
    tried again by the requests to its policies."""
    for base_model in {policy.base_model for policy in await service.read(list_policies)}:
        try:
            await service.renderers.load(base_model)
        except ModelUnreadable as error:
            log.warning("base_model_unreadable", base_model=base_model, error=str(error))
