# Two images of one wheel:
#
#   docker build --target sidecar -t driftguard-sidecar .   sidecar and proxy; no torch, PostgreSQL is elsewhere
#   docker build --target engine -t driftguard-engine .     the same with the engine and the retraining
#
# The second takes torch from where pip looks by default. For another build of torch (a small one for the CPU,
# one for your CUDA) name its package index: --build-arg TORCH_INDEX_URL=...

FROM python:3.12-slim-bookworm AS wheel
RUN apt-get update \
 && apt-get install --yes --no-install-recommends binutils
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY driftguard driftguard
COPY driftguard_http driftguard_http
COPY driftguard_vllm driftguard_vllm
COPY engine/driftguard_engine engine/driftguard_engine
COPY engine/training engine/training
COPY migrations migrations
COPY alerts/runbooks alerts/runbooks
COPY deploy/image/slim.py /
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
 && python -m venv --without-pip /opt/driftguard

FROM wheel AS sidecar-packages
RUN pip --python /opt/driftguard install --no-cache-dir --no-compile \
      "$(ls /wheels/driftguard_llm-*.whl)[proxy,otlp]" \
 && PYTHONPYCACHEPREFIX=/opt/driftguard/pycache /opt/driftguard/bin/python -B /slim.py

FROM wheel AS engine-packages
ARG TORCH_INDEX_URL=""
RUN if [ -n "$TORCH_INDEX_URL" ]; then \
      pip --python /opt/driftguard install --no-cache-dir --no-compile --index-url "$TORCH_INDEX_URL" 'torch>=2.11'; \
    fi \
 && pip --python /opt/driftguard install --no-cache-dir --no-compile \
      "$(ls /wheels/driftguard_llm-*.whl)[proxy,otlp,engine,cuda]" \
 && PYTHONPYCACHEPREFIX=/opt/driftguard/pycache /opt/driftguard/bin/python -B /slim.py

# Without what a running image does not use: pip, windows, manuals, Perl, and character sets that Python brings itself.
# Packages of Debian, which need Perl, are added in front of this.
FROM python:3.12-slim-bookworm AS lean
RUN cd /usr/local/lib/python3.12 \
 && rm -rf site-packages/* ensurepip idlelib lib2to3 pydoc_data tkinter turtledemo turtle.py config-* \
 && rm -f /usr/local/bin/pip* /usr/local/bin/idle* /usr/local/bin/2to3* /usr/local/bin/pydoc* \
 && rm -rf /usr/bin/perl* /usr/share/perl5 /usr/lib/*-linux-gnu/perl-base /usr/lib/*-linux-gnu/gconv

FROM scratch AS runtime
COPY --from=lean / /
# HOME: the engine's spool, and models from a hub, are on the volume too.
ENV PATH=/opt/driftguard/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPYCACHEPREFIX=/opt/driftguard/pycache \
    HOME=/var/lib/driftguard \
    DRIFTGUARD_DATA_DIR=/var/lib/driftguard
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/driftguard --create-home driftguard \
 && install --directory --owner=10001 --group=10001 /var/lib/driftguard-rules
USER 10001:10001
VOLUME /var/lib/driftguard
ENTRYPOINT ["driftguard"]

FROM runtime AS engine
COPY --from=engine-packages /opt/driftguard /opt/driftguard
EXPOSE 8100
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8100/health', timeout=4)"]
CMD ["engine", "--host", "0.0.0.0"]

# `docker build .` makes the last one.
FROM runtime AS sidecar
COPY --from=sidecar-packages /opt/driftguard /opt/driftguard
EXPOSE 8200
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8200/healthz', timeout=4)"]
CMD ["serve", "--host", "0.0.0.0"]
