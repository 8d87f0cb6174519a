//! SVG plots of a simulation.

use std::path::Path;

use anyhow::{Context, Result};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::Outcome;

const SIZE: (u32, u32) = (900, 500);
const COLOURS: [RGBColor; 4] =
    [RGBColor(31, 119, 180), RGBColor(255, 127, 14), RGBColor(44, 160, 44), RGBColor(214, 39, 40)];

/// Drawing area.
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartBuilder<'a, 'a, SVGBackend<'b>>;
type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

/// Plots the due share of each always busy vGPU as a line, and the received share as points.
pub fn shares(path: &Path, outcome: &Outcome) -> Result<()> {
    let mut busy: Vec<_> =
        outcome.members.iter().filter(|member| member.workload.is_endless()).collect();
    busy.sort_by(|a, b| a.due.total_cmp(&b.due));
    let most = busy.iter().map(|member| member.due.max(member.got)).fold(0.0, f64::max);
    let title =
        format!("{} vGPUs, {}: due share (line) and received share", outcome.vgpus, outcome.mix);
    draw(path, |root| {
        let mut chart =
            framed(root, &title).build_cartesian_2d(0.0..busy.len() as f64, 0.0..most * 110.0)?;
        chart
            .configure_mesh()
            .x_desc("always busy vGPUs, by due share")
            .y_desc("hundredths of the GPU")
            .draw()?;
        let at = |index: usize| index as f64 + 0.5;
        let points = busy.iter().enumerate();
        chart.draw_series(points.clone().map(|(index, member)| {
            Circle::new((at(index), member.got * 100.0), 3, COLOURS[1].filled())
        }))?;
        chart.draw_series(LineSeries::new(
            points.map(|(index, member)| (at(index), member.due * 100.0)),
            COLOURS[0].stroke_width(2),
        ))?;
        Ok(())
    })
}

/// Plots the waiting times for a time slice, from the median to one in ten thousand.
pub fn waits(path: &Path, outcomes: &[&Outcome]) -> Result<()> {
    const NINES: [f64; 9] = [0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 0.9995, 0.9999];
    let wait = |outcome: &Outcome, part| (outcome.waits.quantile(part) as f64 / 1e6).max(1e-3);
    let most = outcomes.iter().map(|outcome| wait(outcome, 0.9999)).fold(1e-2, f64::max);
    let vgpus = outcomes.first().map_or(0, |outcome| outcome.vgpus);
    let title = format!("{vgpus} vGPUs: waiting time for a slice");
    draw(path, |root| {
        let mut chart = framed(root, &title)
            .build_cartesian_2d(0.0..(NINES.len() - 1) as f64, (1e-3..most * 2.0).log_scale())?;
        chart
            .configure_mesh()
            .x_labels(NINES.len())
            .x_label_formatter(&|at| {
                let place = (0..NINES.len()).find(|place| *place as f64 >= at.round());
                let part = place.map_or(1.0, |place| NINES[place]);
                format!("{} %", part * 100.0)
            })
            .x_desc("of all turns")
            .y_desc("waited at most, ms")
            .draw()?;
        for (outcome, colour) in outcomes.iter().zip(COLOURS.iter().cycle()) {
            let points = NINES.iter().enumerate();
            chart
                .draw_series(LineSeries::new(
                    points.map(|(at, part)| (at as f64, wait(outcome, *part))),
                    colour.stroke_width(2),
                ))?
                .label(outcome.mix)
                .legend(|(x, y)| PathElement::new([(x, y), (x + 16, y)], *colour));
        }
        chart.configure_series_labels().background_style(WHITE).border_style(BLACK).draw()?;
        Ok(())
    })
}

/// Plots the cost of a decision by the number of vGPUs.
pub fn costs(path: &Path, outcomes: &[Outcome]) -> Result<()> {
    let most = outcomes.iter().map(|outcome| outcome.decision_ns).fold(2000.0, f64::max);
    let last = outcomes.iter().map(|outcome| outcome.vgpus).max().unwrap_or(1) as f64;
    draw(path, |root| {
        let title = "Cost of a decision for one vGPU (promised: under 2000 ns)";
        let mut chart = framed(root, title)
            .build_cartesian_2d((1.0..last * 1.5).log_scale(), 0.0..most * 1.1)?;
        chart.configure_mesh().x_desc("vGPUs").y_desc("ns").draw()?;
        chart.draw_series(outcomes.iter().map(|outcome| {
            Circle::new((outcome.vgpus as f64, outcome.decision_ns), 4, COLOURS[0].filled())
        }))?;
        chart.draw_series(LineSeries::new([(1.0, 2000.0), (last * 1.5, 2000.0)], COLOURS[3]))?;
        Ok(())
    })
}

/// Returns a chart with a title and without axes.
fn framed<'a, 'b>(root: &'a Area<'b>, title: &str) -> Chart<'a, 'b> {
    let mut chart = ChartBuilder::on(root);
    chart.caption(title, ("sans-serif", 20)).margin(12).x_label_area_size(36).y_label_area_size(64);
    chart
}

/// Writes a file with the drawing of `body`.
fn draw(path: &Path, body: impl FnOnce(&Area<'_>) -> Drawn) -> Result<()> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    let all = || -> Drawn {
        root.fill(&WHITE)?;
        body(&root)?;
        Ok(root.present()?)
    };
    all()
        .map_err(|error| anyhow::anyhow!("{error}"))
        .with_context(|| format!("Cannot write {}", path.display()))
}
