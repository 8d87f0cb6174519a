//! State of `top`: last statistics, history of shares, selection.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use mdev_core::ids::VgpuId;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::widgets::TableState;
use vgpud_api::{ParentStats, Stats, VgpuStats};

/// Number of readings kept per vGPU; enough for a wide terminal.
const HISTORY: usize = 256;

/// History of one vGPU.
#[derive(Debug, Default)]
pub struct History {
    /// Shares in thousandths of the GPU, oldest first.
    pub shares: VecDeque<u64>,
    /// Submissions per second between the last two readings.
    pub submissions: f64,
    last: Option<(Instant, u64)>,
}

/// State of the screen.
#[derive(Debug)]
pub struct App {
    stats: Stats,
    history: BTreeMap<VgpuId, History>,
    /// Selected parent; `None` shows all parents.
    parent: Option<String>,
    selected: Option<VgpuId>,
    /// Error of the last request, if it failed.
    pub error: Option<String>,
    /// Selection and scroll position of the table.
    pub table: TableState,
}

impl App {
    /// Creates a state without statistics.
    pub fn new(parent: Option<String>) -> Self {
        Self {
            stats: Stats::default(),
            history: BTreeMap::new(),
            parent,
            selected: None,
            error: None,
            table: TableState::default(),
        }
    }

    /// Replaces the statistics and appends to the history.
    pub fn update(&mut self, stats: Stats, now: Instant) {
        self.history.retain(|id, _| stats.vgpus.iter().any(|vgpu| vgpu.uuid == *id));
        for vgpu in &stats.vgpus {
            self.history.entry(vgpu.uuid).or_default().update(vgpu, now);
        }
        self.stats = stats;
        self.error = None;
        self.select();
    }

    /// Records a failed request for statistics.
    pub fn set_error(&mut self, error: String) {
        self.error = Some(error);
    }

    /// Handles a key. Returns `true` if the key quits.
    pub fn key(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return false;
        }
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Up | KeyCode::Char('k') => self.step(-1),
            KeyCode::Down | KeyCode::Char('j') => self.step(1),
            KeyCode::PageUp => self.step(-10),
            KeyCode::PageDown => self.step(10),
            KeyCode::Home => self.step(isize::MIN),
            KeyCode::End => self.step(isize::MAX),
            KeyCode::Left | KeyCode::Char('h') => self.select_parent(false),
            KeyCode::Right | KeyCode::Char('l') => self.select_parent(true),
            _ => {}
        }
        false
    }

    /// Returns the shown parents.
    pub fn parents(&self) -> impl Iterator<Item = &ParentStats> {
        let shown = |parent: &&ParentStats| self.shows(&parent.parent);
        self.stats.parents.iter().filter(shown)
    }

    /// Returns the shown vGPUs with their histories.
    pub fn vgpus(&self) -> impl Iterator<Item = (&VgpuStats, Option<&History>)> {
        let shown = self.stats.vgpus.iter().filter(|vgpu| self.shows(&vgpu.parent));
        shown.map(|vgpu| (vgpu, self.history.get(&vgpu.uuid)))
    }

    /// Returns the selected vGPU with its history.
    pub fn selected(&self) -> Option<(&VgpuStats, Option<&History>)> {
        self.vgpus().find(|(vgpu, _)| Some(vgpu.uuid) == self.selected)
    }

    fn shows(&self, parent: &str) -> bool {
        self.parent.as_ref().is_none_or(|only| only == parent)
    }

    fn nth(&self, index: usize) -> Option<VgpuId> {
        self.vgpus().nth(index).map(|(vgpu, _)| vgpu.uuid)
    }

    fn position(&self) -> Option<usize> {
        self.vgpus().position(|(vgpu, _)| Some(vgpu.uuid) == self.selected)
    }

    /// Keeps the selected vGPU, or selects the first one if the vGPU is gone.
    fn select(&mut self) {
        if self.position().is_none() {
            self.selected = self.nth(0);
        }
        self.table.select(self.position());
    }

    fn step(&mut self, by: isize) {
        let last = self.vgpus().count().saturating_sub(1);
        let to = self.position().unwrap_or(0).saturating_add_signed(by).min(last);
        self.selected = self.nth(to);
        self.table.select(self.position());
    }

    /// Selects the next or previous entry of the cycle: all parents, then each parent.
    fn select_parent(&mut self, forward: bool) {
        let count = self.stats.parents.len();
        let names = || self.stats.parents.iter().map(|parent| &parent.parent);
        let at = self.parent.as_ref().and_then(|only| names().position(|name| name == only));
        // Place 0 stands for all parents.
        let place = at.map_or(0, |at| at + 1);
        let next = (place + if forward { 1 } else { count }) % (count + 1);
        self.parent = next.checked_sub(1).and_then(|index| names().nth(index).cloned());
        self.select();
    }
}

impl History {
    fn update(&mut self, vgpu: &VgpuStats, now: Instant) {
        let last = self.last.replace((now, vgpu.submissions));
        if let Some((then, before)) = last {
            let seconds = now.saturating_duration_since(then).as_secs_f64().max(1e-3);
            self.submissions = vgpu.submissions.saturating_sub(before) as f64 / seconds;
        }
        if self.shares.len() == HISTORY {
            self.shares.pop_front();
        }
        // Negative values and NaN become 0.
        #[allow(clippy::cast_sign_loss)]
        self.shares.push_back((vgpu.share_measured * 10.0).round() as u64);
    }
}
