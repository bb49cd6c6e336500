"""What a Dockerfile copies, as far as its text says so."""

import pytest

from kici.decide.build_files import copied_files


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM a\nRUN b\n", ()),
        ("COPY a b c /dst/\n", ("a", "b", "c")),
        ("copy ./a/ /dst\nADD b /dst\nCOPY a /again\n", ("a", "b")),
        ("COPY . /src", (".",)),
        ("COPY ./ /src", (".",)),
        ("COPY src/*.py /src/", ("src/*.py",)),
        ("COPY --chown=1:1 --link a /dst", ("a",)),
        ("COPY --from=base /a /b", ()),
        ('COPY ["a b", "c", "/dst"]', ("a b", "c")),
        ("ADD https://example.org/a.tgz git@host:repo b /dst", ("b",)),
        ("COPY a \\\n  # a comment between\n  b \\\n  /dst\n", ("a", "b")),
        ("# COPY a /dst\nRUN echo COPY b /dst\n", ()),
        ("ARG F=a\nCOPY $F b /dst\n", ("b",)),
        ("COPY <<EOF /dst\nhello\nEOF\n", ()),
        ("COPY [broken", ()),
        ("COPY", ()),
    ],
)
def test_sources_are_found(text: str, expected: tuple[str, ...]) -> None:
    assert copied_files(text) == expected
