//! What `top` knows: the last statistics, the history of shares, what is selected.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use mdev_core::ids::VgpuId;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::widgets::TableState;
use vfio_user_server::api::model::{ParentStats, Stats, VgpuStats};

/// Readings kept of each share: as many as a wide terminal can show.
const HISTORY: usize = 256;

/// What is known of one vGPU besides its last statistics.
#[derive(Debug, Default)]
pub struct History {
    /// Its share, in thousandths of the GPU, the oldest first.
    pub shares: VecDeque<u64>,
    /// Submissions per second between the last two readings.
    pub submissions: f64,
    last: Option<(Instant, u64)>,
}

/// All that is shown.
#[derive(Debug)]
pub struct App {
    stats: Stats,
    history: BTreeMap<VgpuId, History>,
    /// The one parent that is shown, where it is not all.
    parent: Option<String>,
    selected: Option<VgpuId>,
    /// Why there is nothing new.
    pub lost: Option<String>,
    /// Where the table is scrolled to.
    pub table: TableState,
}

impl App {
    /// Nothing is known yet.
    pub fn new(parent: Option<String>) -> Self {
        Self {
            stats: Stats::default(),
            history: BTreeMap::new(),
            parent,
            selected: None,
            lost: None,
            table: TableState::default(),
        }
    }

    /// Takes new statistics.
    pub fn take(&mut self, stats: Stats, now: Instant) {
        self.history.retain(|id, _| stats.vgpus.iter().any(|vgpu| vgpu.uuid == *id));
        for vgpu in &stats.vgpus {
            self.history.entry(vgpu.uuid).or_default().take(vgpu, now);
        }
        self.stats = stats;
        self.lost = None;
        self.select();
    }

    /// There are no new statistics.
    pub fn lose(&mut self, why: String) {
        self.lost = Some(why);
    }

    /// Does what a key is for; true where that is to leave.
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
            KeyCode::Left | KeyCode::Char('h') => self.turn(false),
            KeyCode::Right | KeyCode::Char('l') => self.turn(true),
            _ => {}
        }
        false
    }

    /// The physical GPUs that are shown.
    pub fn parents(&self) -> impl Iterator<Item = &ParentStats> {
        let shown = |parent: &&ParentStats| self.shows(&parent.parent);
        self.stats.parents.iter().filter(shown)
    }

    /// The vGPUs that are shown, with their history.
    pub fn vgpus(&self) -> impl Iterator<Item = (&VgpuStats, Option<&History>)> {
        let shown = self.stats.vgpus.iter().filter(|vgpu| self.shows(&vgpu.parent));
        shown.map(|vgpu| (vgpu, self.history.get(&vgpu.uuid)))
    }

    /// The selected vGPU.
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

    /// Keeps the selection on the same vGPU, or puts it on the first one.
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

    /// All parents, then each alone, and round again.
    fn turn(&mut self, forward: bool) {
        let count = self.stats.parents.len();
        let names = || self.stats.parents.iter().map(|parent| &parent.parent);
        let at = self.parent.as_ref().and_then(|only| names().position(|name| name == only));
        // 0 is all of them.
        let place = at.map_or(0, |at| at + 1);
        let next = (place + if forward { 1 } else { count }) % (count + 1);
        self.parent = next.checked_sub(1).and_then(|index| names().nth(index).cloned());
        self.select();
    }
}

impl History {
    fn take(&mut self, vgpu: &VgpuStats, now: Instant) {
        let last = self.last.replace((now, vgpu.submissions));
        if let Some((then, before)) = last {
            let seconds = now.saturating_duration_since(then).as_secs_f64().max(1e-3);
            self.submissions = vgpu.submissions.saturating_sub(before) as f64 / seconds;
        }
        if self.shares.len() == HISTORY {
            self.shares.pop_front();
        }
        // In thousandths; what is negative or no number at all becomes 0.
        #[allow(clippy::cast_sign_loss)]
        self.shares.push_back((vgpu.share_measured * 10.0).round() as u64);
    }
}
