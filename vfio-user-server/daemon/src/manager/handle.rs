//! Channel to the manager's thread: events, and the handle through which other tasks send them.

use std::fmt;
use std::sync::mpsc;

use tokio::sync::oneshot;

use super::watcher::Watched;
use super::{ClientReport, Manager, Result};
use vgpud_api::{ErrorCode, ErrorDetail};

/// Event for the manager's thread.
pub enum Event {
    /// A closure to run on the manager's thread.
    Call(Box<dyn FnOnce(&mut Manager) + Send>),
    /// The end of a watched process.
    Exited(Watched),
    /// A request to end the manager.
    End(Ending),
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(_) => f.write_str("Call"),
            Self::Exited(watched) => write!(f, "Exited({watched:?})"),
            Self::End(ending) => write!(f, "End({ending:?})"),
        }
    }
}

/// Way in which the manager ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Stop all workers and GPU processes.
    Stop,
    /// Leave workers and GPU processes running for the next manager to adopt.
    Leave,
}

/// Handle by which other tasks call the manager.
#[derive(Clone, Debug)]
pub struct Handle {
    pub(super) events: mpsc::Sender<Event>,
}

/// Receiving end of the manager's events.
pub type Inbox = mpsc::Receiver<Event>;

/// Creates the channel to a manager.
pub fn channel() -> (Handle, Inbox) {
    let (events, inbox) = mpsc::channel();
    (Handle { events }, inbox)
}

impl Handle {
    /// Runs `body` on the manager's thread and returns its result.
    pub async fn call<T: Send + 'static>(
        &self,
        body: impl FnOnce(&mut Manager) -> T + Send + 'static,
    ) -> Result<T> {
        let (reply, replied) = oneshot::channel();
        let call = Event::Call(Box::new(move |manager| {
            // The caller may have gone; the call takes effect all the same.
            let _ = reply.send(body(manager));
        }));
        let gone =
            || ErrorDetail::new(ErrorCode::Unavailable, "vgpud is ending; ask again when it runs");
        self.events.send(call).map_err(|_| gone())?;
        replied.await.map_err(|_| gone())
    }

    /// Passes clients that workers reported to the manager, without waiting.
    pub fn report_clients(&self, reports: Vec<ClientReport>) {
        if !reports.is_empty() {
            let call = Box::new(move |manager: &mut Manager| manager.clients_reported(&reports));
            // An error means that the manager has ended already.
            let _ = self.events.send(Event::Call(call));
        }
    }

    /// Tells the manager to end.
    pub fn end(&self, ending: Ending) {
        // An error means that the manager has ended already.
        let _ = self.events.send(Event::End(ending));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_fails_after_the_manager_has_ended() {
        let (handle, inbox) = channel();
        drop(inbox);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let error = runtime.block_on(handle.call(|_| ())).unwrap_err();
        assert_eq!(error.message, "vgpud is ending; ask again when it runs");
    }
}
