//! Plots, as SVG.

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use super::session::Session;
use super::stats::Estimate;
use super::workload::Workload;

const SIZE: (u32, u32) = (420, 260);
/// Told apart by people who see colours differently, too.
const COLOURS: [RGBColor; 4] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
];

/// The colour of a subject in all plots.
pub(crate) fn colour(subject: usize) -> RGBColor {
    COLOURS[subject % COLOURS.len()]
}

/// Each run of a workload, in the order of the rounds; one colour for each subject.
pub(crate) fn runs(session: &Session, workload: Workload) -> Result<String> {
    let series: Vec<Vec<f64>> = (0..session.subjects.len())
        .map(|subject| session.figures(subject, workload, |s| s.value).concat())
        .collect();
    let count = series.iter().map(Vec::len).max().unwrap_or_default();
    let top = series.concat().into_iter().fold(0.0, f64::max);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        #[expect(clippy::cast_precision_loss, reason = "counts of runs")]
        let mut chart = ChartBuilder::on(&root)
            .margin(8)
            .caption(
                format!("{}, {}", workload.name(), workload.unit()),
                ("sans-serif", 15),
            )
            .x_label_area_size(24)
            .y_label_area_size(48)
            .build_cartesian_2d(0.5..(count.max(1) as f64 + 0.5), 0.0..(top * 1.1).max(0.01))
            .map_err(drawn)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(count.clamp(1, 10))
            .x_label_formatter(&|x| format!("{x:.0}"))
            .draw()
            .map_err(drawn)?;
        for (subject, values) in series.iter().enumerate() {
            let colour = colour(subject);
            let points: Vec<(f64, f64)> = (1..)
                .zip(values)
                .map(|(run, value)| (f64::from(run), *value))
                .collect();
            chart
                .draw_series(LineSeries::new(points.iter().copied(), colour.mix(0.4)))
                .map_err(drawn)?;
            chart
                .draw_series(points.iter().map(|at| Circle::new(*at, 3, colour.filled())))
                .map_err(drawn)?;
        }
        root.present().map_err(drawn)?;
    }
    Ok(svg)
}

/// Ratios with their intervals, one line each; the upright line is 1.
pub(crate) fn ratios(rows: &[(String, Estimate)]) -> Result<String> {
    let high = rows.iter().map(|(_, e)| e.high).fold(1.2, f64::max);
    let low = rows.iter().map(|(_, e)| e.low).fold(0.8, f64::min);
    let lines = u32::try_from(rows.len())?;
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (640, 60 + 26 * lines)).into_drawing_area();
        let span = -0.5..(f64::from(lines) - 0.5);
        let mut chart = ChartBuilder::on(&root)
            .margin(8)
            .x_label_area_size(24)
            .y_label_area_size(120)
            .build_cartesian_2d((low * 0.9)..(high * 1.1), span.clone())
            .map_err(drawn)?;
        chart
            .configure_mesh()
            .disable_mesh()
            .y_labels(0)
            .draw()
            .map_err(drawn)?;
        chart
            .draw_series(LineSeries::new(
                [(1.0, span.start), (1.0, span.end)],
                BLACK.mix(0.5),
            ))
            .map_err(drawn)?;
        for (line, (name, e)) in (0..lines).zip(rows) {
            let y = f64::from(lines - 1 - line);
            chart
                .draw_series(LineSeries::new(
                    [(e.low, y), (e.high, y)],
                    COLOURS[0].stroke_width(2),
                ))
                .map_err(drawn)?;
            chart
                .draw_series([Circle::new((e.median, y), 4, COLOURS[0].filled())])
                .map_err(drawn)?;
            let (_, pixel) = chart.backend_coord(&(e.median, y));
            root.draw(&Text::new(
                name.clone(),
                (10, pixel - 6),
                ("sans-serif", 13),
            ))
            .map_err(drawn)?;
        }
        root.present().map_err(drawn)?;
    }
    Ok(svg)
}

fn drawn(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("cannot draw: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_drawn_with_their_names() {
        let estimate = Estimate {
            median: 2.0,
            low: 1.5,
            high: 2.5,
            count: 4,
        };
        let svg = ratios(&[("down1".to_owned(), estimate)]).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("down1"), "{svg}");
    }
}
