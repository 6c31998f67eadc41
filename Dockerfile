# Relay and worker in one image: conquiet relay run (the default), conquiet worker run app:router, …
#   docker build -t conquiet .
#   docker run --rm -e CONQUIET_DATABASE_URL=… -e CONQUIET_OUTBOX_SINK=redis://… conquiet

# Any image with Python 3.11 or newer and its venv.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/conquiet
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE constraints.txt ./
COPY src ./src
# Extras beyond these: docker build --build-arg EXTRAS=metrics,postgres,redis,pubsub .
ARG EXTRAS=metrics,postgres,redis
RUN /opt/conquiet/bin/pip install --constraint constraints.txt ".[${EXTRAS}]"

FROM ${BASE}
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin conquiet
COPY --from=build /opt/conquiet /opt/conquiet
ENV PATH=/opt/conquiet/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    CONQUIET_LOG_FORMAT=json \
    CONQUIET_OUTBOX_HEALTH=0.0.0.0:8081
WORKDIR /app
USER 10001
EXPOSE 8081
# A relay drains at SIGTERM within CONQUIET_OUTBOX_GRACE_SECONDS (25 s): give it 30 before SIGKILL.
STOPSIGNAL SIGTERM
# No ENTRYPOINT: Heroku runs its commands through a shell.
CMD ["conquiet", "relay", "run"]
