//! Drawing of `top`: a line per parent, a row per vGPU, and details of the selected vGPU.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Paragraph, Row, Sparkline, Table};
use vgpud_api::{ParentStats, VgpuState, VgpuStats};

use super::app::{App, History};
use crate::commands::stats::user;
use crate::units::{memory, seconds};

/// Widths of fixed columns. The bar and the history share the remaining width.
const UUID: u16 = 8;
const TYPE: u16 = 12;
const STATE: u16 = 10;
const NUMBER: u16 = 7;
const MEMORY: u16 = 10;
const VM: u16 = 11;
/// Number of rows of the details, without processes.
const DETAILS: u16 = 7;
/// Limit of the processes in the details.
const MAX_PROCESSES: usize = 4;

/// Draws the screen.
pub fn draw(frame: &mut Frame<'_>, app: &mut App) {
    let parents = app.parents().count().clamp(1, 4) as u16;
    let processes = app.selected().and_then(|(vgpu, _)| vgpu.programs.as_ref());
    let processes = processes.map_or(0, |all| all.processes.len().min(MAX_PROCESSES));
    let details = DETAILS + processes as u16;
    let details = if frame.area().height > parents + details + 6 { details } else { 0 };
    let [head, table, details_area, foot] = Layout::vertical([
        Constraint::Length(parents),
        Constraint::Min(2),
        Constraint::Length(details),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(app.parents().map(parent).collect::<Vec<_>>()), head);
    vgpus(frame, app, table);
    if details > 0 {
        selected(frame, app, details_area);
    }
    let line = match &app.error {
        Some(error) => Line::from(error.clone()).style(Color::Red),
        None => Line::from("q quit   ↑ ↓ select a vGPU   ← → select a parent").dim(),
    };
    frame.render_widget(line, foot);
}

fn parent(parent: &ParentStats) -> Line<'static> {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let used = parent.vram_bytes.saturating_sub(parent.vram_free_bytes);
    let mut spans = vec![
        Span::from(parent.parent.clone()).bold(),
        Span::from(format!("  {}  busy ", parent.policy)),
    ];
    spans.extend(bar(parent.busy, None, 20));
    spans.push(Span::from(format!(
        " {:5.1} %  video memory {:.1} of {:.1} GiB",
        parent.busy,
        gib(used),
        gib(parent.vram_bytes)
    )));
    if !parent.ready {
        spans.push(Span::from("  LOST").fg(Color::Red).bold());
    }
    Line::from(spans)
}

fn vgpus(frame: &mut Frame<'_>, app: &mut App, area: Rect) {
    let fixed = UUID + TYPE + STATE + 2 * NUMBER + MEMORY + VM + 8;
    let rest = area.width.saturating_sub(fixed);
    let bars = (rest * 3 / 5).min(50);
    let history = rest - bars;
    let row = |(vgpu, past): (&VgpuStats, Option<&History>)| {
        let asked = asked(vgpu);
        Row::new([
            Line::from(vgpu.uuid.to_string().chars().take(UUID.into()).collect::<String>()),
            Line::from(vgpu.mdev_type.clone()),
            state(vgpu.state),
            Line::from(asked.map_or_else(|| "-".to_owned(), |share| format!("{share:.1}")))
                .right_aligned(),
            Line::from(format!("{:.1}", vgpu.share_measured)).right_aligned(),
            Line::from(bar(vgpu.share_measured, asked, bars)),
            Line::from(sparkline(past, history)).fg(Color::Cyan),
            Line::from(memory(vgpu.vram_bytes)).right_aligned(),
            Line::from(user(vgpu).unwrap_or_else(|| "-".to_owned())).right_aligned(),
        ])
    };
    let rows: Vec<_> = app.vgpus().map(row).collect();
    if rows.is_empty() {
        frame.render_widget(Paragraph::new("\nNo vGPU is running."), area);
        return;
    }
    let right = |text: &'static str| Line::from(text).right_aligned();
    let header = Row::new([
        Line::from("VGPU"),
        Line::from("TYPE"),
        Line::from("STATE"),
        right("ASKED %"),
        right("GOT %"),
        Line::from("| asked"),
        Line::from("HISTORY"),
        right("MEMORY"),
        right("VM"),
    ]);
    let table = Table::new(
        rows,
        [UUID, TYPE, STATE, NUMBER, NUMBER, bars, history, MEMORY, VM].map(Constraint::Length),
    )
    .header(header.style(Style::new().add_modifier(Modifier::BOLD)))
    .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_stateful_widget(table, area, &mut app.table);
}

fn selected(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let Some((vgpu, past)) = app.selected() else { return };
    let block = Block::new().borders(Borders::TOP).title(format!(" {} ", vgpu.uuid));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [text, graph] =
        Layout::horizontal([Constraint::Percentage(60), Constraint::Percentage(40)]).areas(inner);
    frame.render_widget(Paragraph::new(details(vgpu, past)), text);
    let data: Vec<u64> = recent(past, graph.width.into()).collect();
    frame.render_widget(
        Sparkline::default().data(data).max(1000).style(Style::new().fg(Color::Cyan)),
        graph,
    );
}

fn details(vgpu: &VgpuStats, past: Option<&History>) -> Vec<Line<'static>> {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "none".to_owned());
    let used_by = if vgpu.programs.is_some() { "" } else { "VM " };
    let in_use = vgpu.programs.as_ref().map(|programs| memory(programs.vram_used_bytes));
    let mut lines = vec![
        Line::from(format!(
            "on {}  {used_by}{}  worker {}",
            vgpu.parent,
            or_none(user(vgpu)),
            or_none(vgpu.pid.map(|pid| pid.to_string()))
        )),
        Line::from(format!(
            "due {:.1} %  at most {:.0} %  {}  {} priority  slice {} ms",
            vgpu.share_entitled,
            vgpu.share_cap,
            vgpu.mode,
            vgpu.priority,
            vgpu.timeslice_us as f64 / 1e3
        )),
        Line::from(format!(
            "engine {} (kernels {}, copies {})",
            seconds(vgpu.engine_ns),
            seconds(vgpu.engines.compute_ns),
            seconds(vgpu.engines.copy_ns)
        )),
        Line::from(format!(
            "waited {}, capped {}  preempted {}  overruns {}",
            seconds(vgpu.wait_ns),
            seconds(vgpu.gated_ns),
            vgpu.preemptions,
            vgpu.slice_overruns
        )),
        Line::from(format!(
            "submitted {} ({:.0}/s)  throttled {}  wake-ups {}  faults {}  hangs {}",
            vgpu.submissions,
            past.map_or(0.0, |past| past.submissions),
            vgpu.throttled,
            vgpu.wakeups,
            vgpu.faults,
            vgpu.hang_resets
        )),
        Line::from(format!(
            "video memory {}{}  guest memory {}  channels {} of {}",
            in_use.map_or_else(String::new, |used| format!("{used} of ")),
            memory(vgpu.vram_bytes),
            memory(vgpu.imported_bytes),
            vgpu.channels,
            vgpu.limits.channels
        )),
    ];
    let processes = vgpu.programs.iter().flat_map(|programs| &programs.processes);
    lines.extend(processes.take(MAX_PROCESSES).map(|process| {
        let used = memory(process.vram_used_bytes);
        Line::from(format!("process {} {}  video memory {used}", process.pid, process.name))
    }));
    lines
}

/// Returns the requested share in percent.
fn asked(vgpu: &VgpuStats) -> Option<f64> {
    vgpu.share_asked.map(f64::from)
}

fn state(state: VgpuState) -> Line<'static> {
    match state {
        VgpuState::Running => Line::from("running"),
        VgpuState::Stopped => Line::from("stopped"),
        VgpuState::Restarting => Line::from("restarting").fg(Color::Yellow),
        VgpuState::Failed => Line::from("failed").fg(Color::Red),
    }
}

/// Returns a bar for a percentage, with a mark at the requested share.
fn bar(percent: f64, asked: Option<f64>, width: u16) -> Vec<Span<'static>> {
    // The value is clamped to 0..=width.
    #[allow(clippy::cast_sign_loss)]
    let place = |percent: f64| {
        (percent / 100.0 * f64::from(width)).round().clamp(0.0, f64::from(width)) as usize
    };
    let mut cells = vec!['·'; width.into()];
    cells[..place(percent)].fill('█');
    let short = asked.is_some_and(|asked| percent + 2.0 < asked);
    let colour = if short { Color::Yellow } else { Color::Green };
    let Some(mark) = asked.map(|asked| place(asked).min(cells.len().saturating_sub(1))) else {
        return vec![Span::from(cells.into_iter().collect::<String>()).fg(colour)];
    };
    let text = |cells: &[char]| Span::from(cells.iter().collect::<String>()).fg(colour);
    match cells.split_at_checked(mark) {
        Some((before, [_, after @ ..])) => vec![text(before), Span::from("|").bold(), text(after)],
        _ => Vec::new(),
    }
}

/// Returns the history as one line of block characters, newest at the right.
fn sparkline(past: Option<&History>, width: u16) -> String {
    const LEVELS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let level = |share: u64| LEVELS[(share.saturating_mul(8).div_ceil(1000) as usize).min(8)];
    let line: String = recent(past, width.into()).map(level).collect();
    format!("{line:>width$}", width = width.into())
}

/// Returns the last `count` readings.
fn recent(past: Option<&History>, count: usize) -> impl Iterator<Item = u64> {
    let shares = past.map(|past| &past.shares).into_iter().flatten().copied();
    let known = past.map_or(0, |past| past.shares.len());
    shares.skip(known.saturating_sub(count))
}
