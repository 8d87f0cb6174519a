//! Callout scripts, as mdevctl runs them: what a site wants to be asked or told of when vGPUs come, change and go.
//!
//! ```text
//! <config-dir>/scripts.d/callouts/     asked before (they may refuse) and told after
//! <config-dir>/scripts.d/notifiers/    told at the end, whatever came of it
//! /usr/lib/vgpud/scripts.d/...         the same, from packages; looked into first
//! ```
//!
//! * [`protocol`]: the words, and the versions that scripts speak
//! * [`script`]: one script, run
//!
//! One script answers for a vGPU: the first, by name, whose status is not 2 ("not my type"). Status 0 is yes; any other
//! refuses, unless force was asked for. They run here and not in `vgpuctl`, so that it does not matter who asks; never
//! on the manager's thread, which waits for nobody.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use mdev_core::definition::Definition;
use mdev_core::ids::VgpuId;

use crate::api::model::{ErrorCode, ErrorDetail};
use crate::api::waiting;
use crate::manager::Result;

pub mod protocol;
pub mod script;

pub use protocol::Action;

use protocol::{Event, State, Supports};
use script::{Outcome, Said};

/// Which vGPU something is done to, and what it is to be like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// Its name.
    pub id: VgpuId,
    /// The physical GPU it is on.
    pub parent: String,
    /// What scripts read of it.
    pub definition: Definition,
}

/// Where scripts are.
#[derive(Clone, Debug)]
pub struct Callouts {
    folders: Arc<[PathBuf]>,
}

/// An action that was begun, and is to be ended by [`Round::end`].
#[derive(Debug)]
pub struct Round {
    callouts: Callouts,
    action: Action,
    subject: Arc<Subject>,
    /// The one that answers for this vGPU, once it is known.
    chosen: Option<Chosen>,
}

#[derive(Clone, Debug)]
struct Chosen {
    path: PathBuf,
    supports: Supports,
}

impl Callouts {
    /// Those in these folders, each of them a `scripts.d`. One that is not there has none.
    pub fn new(folders: Vec<PathBuf>) -> Self {
        Self { folders: folders.into() }
    }

    /// True where there is any script, for any vGPU.
    pub fn are_there(&self) -> bool {
        let kinds = ["callouts", "notifiers"];
        kinds.iter().any(|kind| self.scripts(kind).next().is_some())
    }

    /// Scripts of one kind, by folder and then by name.
    fn scripts(&self, kind: &str) -> impl Iterator<Item = PathBuf> {
        self.folders.iter().flat_map(move |folder| script::in_folder(&folder.join(kind)))
    }

    /// Asks before an action. What is returned says how it went, to the same script and to the notifiers.
    pub async fn begin(&self, action: Action, subject: Subject, force: bool) -> Result<Round> {
        let (callouts, subject) = (self.clone(), Arc::new(subject));
        waiting(move || {
            let mut round = Round { callouts, action, subject, chosen: None };
            round.find_versioned();
            match (round.ask(Event::Pre), force) {
                (Ok(()), _) => Ok(round),
                (Err(error), true) => {
                    log::warn!("{}; it is done all the same, by force", error.message);
                    Ok(round)
                }
                (Err(error), false) => {
                    round.notify(State::None);
                    Err(error)
                }
            }
        })
        .await?
    }

    /// Asks before a running vGPU is changed: only a script that says that it is for that. The rest is told at the end.
    pub async fn begin_live(&self, subject: Subject, force: bool) -> Result<Round> {
        let (callouts, subject) = (self.clone(), Arc::new(subject));
        waiting(move || {
            let mut round = Round { callouts, action: Action::Modify, subject, chosen: None };
            round.find_versioned();
            let asked = match &round.chosen {
                Some(chosen) if chosen.supports.has(Event::Live, Action::Modify) => {
                    round.ask(Event::Live)
                }
                _ => Ok(()),
            };
            match asked {
                Err(error) if !force => {
                    round.notify(State::None);
                    Err(error)
                }
                Err(error) => {
                    log::warn!("{}; it is done all the same, by force", error.message);
                    Ok(round)
                }
                Ok(()) => Ok(round),
            }
        })
        .await?
    }
}

impl Round {
    /// Says how it went. What scripts say to that changes nothing any more.
    pub async fn end(self, done: bool) {
        self.finish(done, true).await;
    }

    /// Says how a change of a running vGPU went: to the notifiers alone, as its callout was told already.
    pub async fn end_live(self, done: bool) {
        self.finish(done, false).await;
    }

    async fn finish(mut self, done: bool, post: bool) {
        let state = if done { State::Success } else { State::Failure };
        let told = waiting(move || {
            if post && let Err(error) = self.ask_with(Event::Post, state) {
                log::warn!("{}", error.message);
            }
            self.notify(if post { state } else { State::None });
        });
        if let Err(error) = told.await {
            log::error!("Callout scripts: {error}");
        }
    }

    /// Looks for a script that says which events and actions it is for.
    fn find_versioned(&mut self) {
        let provides = protocol::provides();
        for path in self.callouts.scripts("callouts") {
            let answer =
                self.run(&path, Event::Get, Action::Capabilities, State::None, Some(&provides));
            // One that is for other types says so; an old one does not understand the question.
            let Ok(Outcome::Ended { status, said }) = answer else { continue };
            if status != 2
                && let Some(supports) = Supports::read(&said.stdout)
            {
                self.chosen = Some(Chosen { path, supports });
                return;
            }
        }
    }

    fn ask(&mut self, event: Event) -> Result<()> {
        self.ask_with(event, State::None)
    }

    fn ask_with(&mut self, event: Event, state: State) -> Result<()> {
        let stdin = serde_json::to_string(&self.subject.definition).unwrap_or_default();
        if let Some(Chosen { path, supports }) = self.chosen.clone() {
            if !supports.has(event, self.action) {
                return Err(self.refusal(
                    &path,
                    &format!("it is not for event {event} of action {}", self.action),
                ));
            }
            let outcome = self.run(&path, event, self.action, state, Some(&stdin));
            return self.judge(&path, outcome);
        }
        for path in self.callouts.scripts("callouts") {
            let outcome = self.run(&path, event, self.action, state, Some(&stdin));
            match &outcome {
                Ok(Outcome::Ended { status: 2, .. }) => continue,
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
            self.judge(&path, outcome)?;
            self.chosen = Some(Chosen { path, supports: Supports::first_version() });
            return Ok(());
        }
        Ok(())
    }

    /// What a script's end means.
    fn judge(&self, path: &Path, outcome: std::io::Result<Outcome>) -> Result<()> {
        match outcome {
            Ok(Outcome::Ended { status: 0, .. } | Outcome::Killed) => Ok(()),
            Ok(Outcome::Ended { status, said }) => {
                let why = said.first_line().map_or_else(String::new, |line| format!(": {line}"));
                Err(self.refusal(path, &format!("status {status}{why}")))
            }
            Ok(Outcome::Untrusted(why)) => Err(self.refusal(path, &why)),
            Err(error) => Err(self.refusal(path, &error.to_string())),
        }
    }

    fn refusal(&self, path: &Path, why: &str) -> ErrorDetail {
        let Self { action, subject, .. } = self;
        let what = format!(
            "Callout script {} does not let {action} vGPU {}: {why}; --force does it all the same",
            path.display(),
            subject.id
        );
        ErrorDetail::new(ErrorCode::Callout, what)
    }

    /// Tells everybody who wants to know.
    fn notify(&self, state: State) {
        for path in self.callouts.scripts("notifiers") {
            let told = self.run(&path, Event::Notify, self.action, state, None);
            if let Err(error) = self.judge(&path, told) {
                log::warn!("{}", error.message);
            }
        }
    }

    fn run(
        &self,
        path: &Path,
        event: Event,
        action: Action,
        state: State,
        stdin: Option<&str>,
    ) -> std::io::Result<Outcome> {
        let Subject { id, parent, definition } = &*self.subject;
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
        if let Ok(Outcome::Ended { said: Said { stderr, .. }, .. }) = &outcome {
            for line in stderr.lines() {
                log::info!("{}: {}", path.display(), line.escape_debug());
            }
        }
        outcome
    }
}
