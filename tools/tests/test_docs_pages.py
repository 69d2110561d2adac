"""Links of README files become links between pages of the site."""

import logging

import docs_pages
import pytest

PAGES = {
    "index.md": "README.md",
    "ops/frame.md": "packages/gdn-kernels/src/gdn_kernels/frame_gdn/README.md",
    "kernels.md": "packages/gdn-kernels/README.md",
}


@pytest.mark.parametrize(
    ("page", "before", "after"),
    [
        ("index.md", "[k](packages/gdn-kernels/README.md#use)", "[k](kernels.md#use)"),
        ("index.md", "![api](docs/api/kernels.md)", "![api](api/kernels.md)"),
        ("index.md", '<img src="docs/api/kernels.md">', '<img src="api/kernels.md">'),
        (
            "index.md",
            "[![x](docs/api/kernels.md)](packages/gdn-kernels/README.md)",
            "[![x](api/kernels.md)](kernels.md)",
        ),
        ("index.md", "see [the licence](LICENSE).", "see the licence."),
        ("index.md", "[a](#here) [b](https://example.org/x)", "[a](#here) [b](https://example.org/x)"),
        ("kernels.md", "[up](../../README.md)", "[up](index.md)"),
        ("ops/frame.md", "[k](../../../README.md) [self](README.md#a)", "[k](../kernels.md) [self](frame.md#a)"),
        ("index.md", "`x[0](LICENSE)`\n```\n[a](LICENSE)\n```\n    [b](LICENSE)", None),
    ],
)
def test_a_link_leads_to_the_page_of_its_file(page, before, after, caplog):
    assert docs_pages.with_site_links(before, page, PAGES) == (before if after is None else after)
    assert caplog.records == []


def test_a_link_to_nothing_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        docs_pages.with_site_links("[x](packages/none.md)", "index.md", PAGES)
    assert "README.md links to packages/none.md, which does not exist" in caplog.text
