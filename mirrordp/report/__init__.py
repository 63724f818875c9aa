"""What a run promises, in words, files and figures."""

from typing import TYPE_CHECKING

from mirrordp._lazy import lazily

if TYPE_CHECKING:
    from mirrordp._rounding import (
        percent_upwards as percent_upwards,
        upwards as upwards,
    )
    from mirrordp.report.card import (
        NOT_FOR_RELEASE as NOT_FOR_RELEASE,
    )
    from mirrordp.report.comparison import (
        Comparison as Comparison,
    )
    from mirrordp.report.evaluation import (
        evaluation_figures as evaluation_figures,
    )
    from mirrordp.report.figures import (
        Curve as Curve,
        comparison_figure as comparison_figure,
    )
    from mirrordp.report.page import (
        comparison_page as comparison_page,
        report_page as report_page,
    )
    from mirrordp.report.statement import (
        RunReport as RunReport,
    )
    from mirrordp.report.stored import (
        ReportError as ReportError,
    )
    from mirrordp.spending.files import (
        write_atomically as write_atomically,
    )

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
