//! Callout scripts, with mdevctl's protocol: site-specific checks and notifications for changes of
//! vGPUs.
//!
//! ```text
//! <config-dir>/scripts.d/callouts/     run before the action (may refuse it) and after it
//! <config-dir>/scripts.d/notifiers/    run after the action, with its result
//! /usr/lib/vgpud/scripts.d/...         the same, from packages; searched first
//! ```
//!
//! * [`protocol`]: actions, events, and the versions that scripts support
//! * [`script`]: execution of one script
//!
//! One script is responsible for a vGPU: the first, by name, that does not exit with status 2 ("not
//! my type"). Status 0 permits the action; any other status refuses it, unless the request has
//! `force`. The daemon runs the scripts, so that they apply to all clients. They run outside the
//! manager's thread, which must not block.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use mdev_core::untrusted::message;

use crate::blocking;
use crate::manager::{PlacedDefinition, Result};
use vgpud_api::{ErrorCode, ErrorDetail};

pub mod protocol;
pub mod script;

pub use protocol::Action;

use protocol::{Event, State, Supports};
use script::{Outcome, Output};

/// Exit status of a script that is not responsible for a vGPU.
const NOT_RESPONSIBLE: i32 = 2;

/// Callout scripts of this host.
#[derive(Clone, Debug)]
pub struct Callouts {
    folders: Arc<[PathBuf]>,
}

/// Run of the callout scripts for one action, from before the action to its result.
#[derive(Debug)]
pub struct CalloutRun {
    callouts: Callouts,
    action: Action,
    vgpu: Arc<PlacedDefinition>,
    /// The script that is responsible for the vGPU, once known.
    responsible: Option<ResponsibleScript>,
}

#[derive(Clone, Debug)]
struct ResponsibleScript {
    path: PathBuf,
    supports: Supports,
}

impl Callouts {
    /// Creates callouts from directories in the form of `scripts.d`. A missing directory has no
    /// scripts.
    pub fn new(folders: Vec<PathBuf>) -> Self {
        Self { folders: folders.into() }
    }

    /// Returns whether the host has any script, for any vGPU.
    pub fn exist(&self) -> bool {
        let kinds = ["callouts", "notifiers"];
        kinds.iter().any(|kind| self.scripts(kind).next().is_some())
    }

    /// Returns the scripts of one kind, by directory and then by name.
    fn scripts(&self, kind: &str) -> impl Iterator<Item = PathBuf> {
        self.folders.iter().flat_map(move |folder| script::in_folder(&folder.join(kind)))
    }

    /// Runs the scripts before an action. The result must be finished with the result of the
    /// action.
    pub async fn before(
        &self,
        action: Action,
        vgpu: PlacedDefinition,
        force: bool,
    ) -> Result<CalloutRun> {
        let mut run = self.new_run(action, vgpu);
        blocking::run(move || {
            run.find_versioned_script();
            let permitted = run.run_callout(Event::Pre, State::None);
            run.unless_refused(permitted, force)
        })
        .await?
    }

    /// Runs the scripts before a modification of a running vGPU. Only a script that supports this
    /// event runs before the modification; notifiers run after it.
    pub async fn before_live(&self, vgpu: PlacedDefinition, force: bool) -> Result<CalloutRun> {
        let mut run = self.new_run(Action::Modify, vgpu);
        blocking::run(move || {
            run.find_versioned_script();
            let permitted = match &run.responsible {
                Some(script) if script.supports.has(Event::Live, Action::Modify) => {
                    run.run_callout(Event::Live, State::None)
                }
                _ => Ok(()),
            };
            run.unless_refused(permitted, force)
        })
        .await?
    }

    fn new_run(&self, action: Action, vgpu: PlacedDefinition) -> CalloutRun {
        CalloutRun { callouts: self.clone(), action, vgpu: Arc::new(vgpu), responsible: None }
    }
}

impl CalloutRun {
    /// Runs the scripts after the action. Their exit status has no effect.
    pub async fn finish(self, succeeded: bool) {
        self.run_after(succeeded, true).await;
    }

    /// Runs the notifiers after a modification of a running vGPU. The event for the callout script
    /// was before it.
    pub async fn finish_live(self, succeeded: bool) {
        self.run_after(succeeded, false).await;
    }

    async fn run_after(mut self, succeeded: bool, post: bool) {
        let state = if succeeded { State::Success } else { State::Failure };
        let done = blocking::run(move || {
            if post && let Err(error) = self.run_callout(Event::Post, state) {
                log::warn!("{}", error.message);
            }
            self.run_notifiers(if post { state } else { State::None });
        });
        if let Err(error) = done.await {
            log::error!("Callout scripts: {error}");
        }
    }

    /// Returns the run if the action is permitted or forced. Otherwise runs the notifiers and
    /// returns the refusal.
    fn unless_refused(self, permitted: Result<()>, force: bool) -> Result<Self> {
        match permitted {
            Ok(()) => Ok(self),
            Err(error) if force => {
                log::warn!("{}; overridden by force", error.message);
                Ok(self)
            }
            Err(error) => {
                self.run_notifiers(State::None);
                Err(error)
            }
        }
    }

    /// Finds the first script that reports the events and actions that it supports.
    fn find_versioned_script(&mut self) {
        let provides = protocol::provides();
        for path in self.callouts.scripts("callouts") {
            let outcome =
                self.execute(&path, Event::Get, Action::Capabilities, State::None, Some(&provides));
            let Ok(Outcome::Exited { status, output }) = outcome else { continue };
            // A script for other types exits with status 2. A script without version support prints
            // no such answer.
            if status != NOT_RESPONSIBLE
                && let Some(supports) = Supports::parse(&output.stdout)
            {
                self.responsible = Some(ResponsibleScript { path, supports });
                return;
            }
        }
    }

    /// Runs the responsible callout script for an event, and finds this script if it is not known
    /// yet.
    fn run_callout(&mut self, event: Event, state: State) -> Result<()> {
        let stdin = serde_json::to_string(&self.vgpu.definition).unwrap_or_default();
        if let Some(ResponsibleScript { path, supports }) = self.responsible.clone() {
            if !supports.has(event, self.action) {
                let reason = format!("it does not support event {event} of action {}", self.action);
                return Err(self.refusal(&path, &reason));
            }
            let outcome = self.execute(&path, event, self.action, state, Some(&stdin));
            return self.check(&path, outcome);
        }
        for path in self.callouts.scripts("callouts") {
            let outcome = self.execute(&path, event, self.action, state, Some(&stdin));
            match &outcome {
                Ok(Outcome::Exited { status: NOT_RESPONSIBLE, .. }) => continue,
                Ok(Outcome::Killed) => {
                    log::warn!("Callout script {} was killed by a signal", path.display());
                    continue;
                }
                Err(error) if error.kind() != std::io::ErrorKind::TimedOut => {
                    log::warn!("Callout script {} cannot be run: {error}", path.display());
                    continue;
                }
                _ => {}
            }
            self.check(&path, outcome)?;
            self.responsible = Some(ResponsibleScript { path, supports: Supports::version_1() });
            return Ok(());
        }
        Ok(())
    }

    /// Turns a script's outcome into permission or refusal.
    fn check(&self, path: &Path, outcome: std::io::Result<Outcome>) -> Result<()> {
        match outcome {
            Ok(Outcome::Exited { status: 0, .. } | Outcome::Killed) => Ok(()),
            Ok(Outcome::Exited { status, output }) => {
                let line = output.first_line().map_or_else(String::new, |line| format!(": {line}"));
                Err(self.refusal(path, &format!("status {status}{line}")))
            }
            Ok(Outcome::Untrusted(reason)) => Err(self.refusal(path, &reason)),
            Err(error) => Err(self.refusal(path, &error.to_string())),
        }
    }

    fn refusal(&self, path: &Path, reason: &str) -> ErrorDetail {
        let Self { action, vgpu, .. } = self;
        let message = format!(
            "Callout script {} refuses to {action} vGPU {}: {reason}; --force overrides it",
            path.display(),
            vgpu.id
        );
        ErrorDetail::new(ErrorCode::Callout, message)
    }

    fn run_notifiers(&self, state: State) {
        for path in self.callouts.scripts("notifiers") {
            let outcome = self.execute(&path, Event::Notify, self.action, state, None);
            if let Err(error) = self.check(&path, outcome) {
                log::warn!("{}", error.message);
            }
        }
    }

    /// Executes a script with mdevctl's arguments, and logs its standard error.
    fn execute(
        &self,
        path: &Path,
        event: Event,
        action: Action,
        state: State,
        stdin: Option<&str>,
    ) -> std::io::Result<Outcome> {
        let PlacedDefinition { id, parent, definition } = &*self.vgpu;
        let args = [
            ["-t", &definition.mdev_type],
            ["-e", &event.to_string()],
            ["-a", &action.to_string()],
            ["-s", &state.to_string()],
            ["-u", &id.to_string()],
            ["-p", parent],
        ];
        log::debug!("{event}-{action}: running {}", path.display());
        let outcome = script::run(path, &args.concat(), stdin.unwrap_or_default());
        if let Ok(Outcome::Exited { output: Output { stderr, .. }, .. }) = &outcome {
            for line in stderr.lines() {
                log::info!("{}: {}", path.display(), message(line));
            }
        }
        outcome
    }
}
