"""What a run promises, in words, files and figures."""

from typing import TYPE_CHECKING

from mirrordp._lazy import lazily

if TYPE_CHECKING:
    from mirrordp.report.comparison import (
        Comparison as Comparison,
    )
    from mirrordp.report.page import (
        comparison_page as comparison_page,
        report_page as report_page,
    )
    from mirrordp.report.statement import (
        NOT_FOR_RELEASE as NOT_FOR_RELEASE,
        Curve as Curve,
        ReportError as ReportError,
        RunReport as RunReport,
        comparison_figure as comparison_figure,
        library_versions as library_versions,
        percent_upwards as percent_upwards,
        upwards as upwards,
        write_atomically as write_atomically,
    )

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
