# One image for every process; `docker run ... evergreen up` runs them all on a CPU.
# torch comes from the index that pip is configured with: pass PIP_INDEX_URL / PIP_EXTRA_INDEX_URL / PIP_FIND_LINKS as
# build arguments to choose a CPU or a CUDA build.
FROM python:3.11-slim

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS

RUN useradd --create-home --uid 1000 evergreen
WORKDIR /srv/evergreen

COPY requirements/ requirements/
RUN pip install --no-cache-dir -r requirements/build.txt \
 && pip install --no-cache-dir --no-deps -r requirements/runtime.txt -r requirements/model.txt

COPY pyproject.toml README.md ./
COPY app/ app/
COPY learner/ learner/
COPY envs/ envs/
COPY evergreen/ evergreen/
COPY migrations/ migrations/
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

ENV EVERGREEN_HOME=/var/lib/evergreen EVERGREEN_HOST=0.0.0.0 PYTHONUNBUFFERED=1
RUN install -d -o evergreen /var/lib/evergreen
USER evergreen
VOLUME /var/lib/evergreen
EXPOSE 8000
CMD ["evergreen", "up"]
