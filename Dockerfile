# A server of translations, from the library's wheel:
#   docker build -t transformer-lib .
#   docker run -p 8000:8000 transformer-lib
#   docker run -p 8000:8000 -v ./runs/mine:/model transformer-lib /model
FROM python:3.12-slim AS build
COPY . /source
RUN pip wheel --no-deps --wheel-dir /wheels /source

FROM python:3.12-slim
COPY --from=build /wheels /wheels
# torch for CPUs alone is smaller: --build-arg PIP_EXTRA_INDEX_URL=(PyTorch's index of it)
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[serving]"
RUN useradd --create-home server
USER server
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD python -c "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health')"
ENTRYPOINT ["transformer-lib", "serve", "--host", "0.0.0.0"]
CMD ["tatoeba-en-de"]
