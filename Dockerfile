# One image for the server and the agent; see docker-compose.yml.
FROM python:3.11-slim

# The agent starts training itself, so a node that is to train needs its framework in the image.
# WITH_TORCH=1 is enough for the reference trainer.
ARG WITH_TORCH=0
RUN [ "$WITH_TORCH" = 0 ] || pip install --no-cache-dir numpy torch==2.13.0

WORKDIR /opt/paceline
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY wire wire
COPY trainer_hooks trainer_hooks
COPY agent agent
COPY server server
COPY web/paceline_web web/paceline_web
COPY cli cli
COPY lab lab
RUN pip install --no-cache-dir ".[agent,server]"
COPY deploy deploy

# Volumes take over the owner of the directory they are mounted on.
RUN useradd --system --home-dir /var/lib/paceline paceline \
    && mkdir -p /var/lib/paceline/tokens /var/lib/paceline/node-0 \
    && chown -R paceline /var/lib/paceline
USER paceline
ENV PYTHONUNBUFFERED=1
CMD ["paceline", "--help"]
