//! Drawing of `top`: a line per parent, a row per vGPU, and details of the selected vGPU.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Paragraph, Row, Sparkline, Table};
use vgpud_api::{ParentStats, VgpuState, VgpuStats};

use super::app::{App, History};
use crate::commands::stats::{programs_of_host, user, waits, waits_in_words};
use crate::units::{memory, seconds};

/// Number of characters of a UUID in the table, and at most of a name.
const UUID: usize = 8;
const NAME: usize = 20;
/// Largest width of the bar, its least width beside the waits, and least width of the history.
const MAX_BAR: u16 = 50;
const MIN_BAR: u16 = 7;
const HISTORY: u16 = 12;
/// Number of rows of the details, without processes.
const DETAILS: u16 = 9;
/// Least width of the graph in the details, and its distance from the text.
const GRAPH: u16 = 12;
const GRAPH_GAP: u16 = 2;
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
    let rows: Vec<_> = app.vgpus().map(|(vgpu, past)| TableRow::new(vgpu, past)).collect();
    if rows.is_empty() {
        frame.render_widget(Paragraph::new("\nNo vGPU is running."), area);
        return;
    }
    // Columns are as wide as their contents, and the bar and the history share the rest.
    let width = |column: usize| {
        let texts = rows.iter().map(|row| row.texts[column].chars().count());
        texts.chain([TITLES[column].len()]).max().unwrap_or_default() as u16
    };
    let mut columns: Vec<_> = (0..TITLES.len()).collect();
    // Each of these columns has a space beside it.
    let taken = |columns: &[usize]| columns.iter().map(|column| width(*column) + 1).sum();
    if area.width < taken(&columns) + MIN_BAR {
        columns.retain(|column| *column != WAIT);
    }
    let (bar, history) = bar_and_history(area.width.saturating_sub(taken(&columns)));
    let mut widths: Vec<_> = columns.iter().map(|column| width(*column)).collect();
    let mut header: Vec<_> =
        columns.iter().map(|column| aligned(*column, TITLES[*column])).collect();
    let mut insert = |at: usize, title: &'static str, width: u16| {
        header.insert(at, Line::from(title));
        widths.insert(at, width);
    };
    insert(BAR_AT, "| asked", bar);
    if history > 0 {
        insert(BAR_AT + 1, "HISTORY", history);
    }
    let shown = rows.iter().map(|row| row.draw(&columns, bar, history));
    let table = Table::new(shown, widths.into_iter().map(Constraint::Length))
        .header(Row::new(header).style(Style::new().add_modifier(Modifier::BOLD)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_stateful_widget(table, area, &mut app.table);
}

/// Divides a width between the bar and the history, which is omitted if it would be narrow.
fn bar_and_history(width: u16) -> (u16, u16) {
    let history = width * 2 / 5;
    if history < HISTORY {
        return (width, 0);
    }
    let bar = (width - history - 1).min(MAX_BAR);
    (bar, width - bar - 1)
}

/// Titles of the columns besides the bar and the history.
const TITLES: [&str; 8] = ["VGPU", "TYPE", "STATE", "ASKED %", "GOT %", "WAIT", "MEMORY", "VM"];
/// Column of the state.
const STATE: usize = 2;
/// Column of the waits, which is omitted if the bar would be narrow.
const WAIT: usize = 5;
/// Place of the bar among these columns.
const BAR_AT: usize = 5;

/// Returns a text of a column. Numbers are right-aligned.
fn aligned(column: usize, text: impl Into<String>) -> Line<'static> {
    let line = Line::from(text.into());
    if column <= STATE { line } else { line.right_aligned() }
}

/// Row of the table.
struct TableRow<'a> {
    texts: [String; TITLES.len()],
    vgpu: &'a VgpuStats,
    past: Option<&'a History>,
}

impl<'a> TableRow<'a> {
    fn new(vgpu: &'a VgpuStats, past: Option<&'a History>) -> Self {
        let texts = [
            match &vgpu.name {
                Some(name) => name.chars().take(NAME).collect(),
                None => vgpu.uuid.to_string().chars().take(UUID).collect(),
            },
            vgpu.mdev_type.clone(),
            state(vgpu.state).0.to_owned(),
            asked(vgpu).map_or_else(|| "-".to_owned(), |share| format!("{share:.1}")),
            format!("{:.1}", vgpu.share_measured),
            waits(vgpu).unwrap_or_else(|| "-".to_owned()),
            memory(vgpu.vram_bytes),
            user(vgpu).unwrap_or_else(|| "-".to_owned()),
        ];
        Self { texts, vgpu, past }
    }

    /// Returns these columns of the row with a bar and a history of these widths.
    fn draw(&self, columns: &[usize], bar_width: u16, history: u16) -> Row<'static> {
        let cell = |column: &usize| aligned(*column, self.texts[*column].clone());
        let mut cells: Vec<_> = columns.iter().map(cell).collect();
        cells[STATE] = cells[STATE].clone().style(state(self.vgpu.state).1);
        let bar = bar(self.vgpu.share_measured, asked(self.vgpu), bar_width);
        cells.insert(BAR_AT, Line::from(bar));
        if history > 0 {
            let line = Line::from(sparkline(self.past, history)).fg(Color::Cyan);
            cells.insert(BAR_AT + 1, line);
        }
        Row::new(cells)
    }
}

fn selected(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let Some((vgpu, past)) = app.selected() else { return };
    let block = Block::new().borders(Borders::TOP).title(match &vgpu.name {
        Some(name) => format!(" {name} {} ", vgpu.uuid),
        None => format!(" {} ", vgpu.uuid),
    });
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let lines = details(vgpu, past);
    // The graph has what the text leaves.
    let text = lines.iter().map(Line::width).max().unwrap_or_default() as u16;
    let graph = inner.width.saturating_sub(text + GRAPH_GAP);
    frame.render_widget(Paragraph::new(lines), inner);
    if graph < GRAPH {
        return;
    }
    let graph = Rect { x: inner.right() - graph, width: graph, ..inner };
    let data: Vec<u64> = recent(past, graph.width.into()).collect();
    frame.render_widget(
        Sparkline::default().data(data).max(1000).style(Style::new().fg(Color::Cyan)),
        graph,
    );
}

fn details(vgpu: &VgpuStats, past: Option<&History>) -> Vec<Line<'static>> {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "none".to_owned());
    let used_by = if programs_of_host(vgpu).is_some() { "" } else { "VM " };
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
        Line::from(format!("waits {}", waits_in_words(vgpu))),
        Line::from(format!(
            "submitted {} ({:.0}/s)  throttled {}  wake-ups {}",
            vgpu.submissions,
            past.map_or(0.0, |past| past.submissions),
            vgpu.throttled,
            vgpu.wakeups
        )),
        Line::from(format!(
            "faults {}  hangs {}  channels {} of {}",
            vgpu.faults, vgpu.hang_resets, vgpu.channels, vgpu.limits.channels
        )),
        Line::from(format!(
            "video memory {}{}  guest memory {}",
            in_use.map_or_else(String::new, |used| format!("{used} of ")),
            memory(vgpu.vram_bytes),
            memory(vgpu.imported_bytes)
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

/// Returns the name of a state and its style.
fn state(state: VgpuState) -> (&'static str, Style) {
    let style = Style::new();
    match state {
        VgpuState::Running => ("running", style),
        VgpuState::Stopped => ("stopped", style),
        VgpuState::Restarting => ("restarting", style.fg(Color::Yellow)),
        VgpuState::Failed => ("failed", style.fg(Color::Red)),
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
