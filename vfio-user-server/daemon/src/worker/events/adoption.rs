//! Recording of a worker's state, and adopting an earlier worker's.

use std::os::fd::AsFd;

use anyhow::Result;
use event_manager::{EventOps, EventSet};
use vfio_user_server::session::Interest;

use super::{Attached, Worker, event_set, peer, source, watch};
use crate::worker::anchored::{Adopted, Anchored};
use crate::worker::control::ControlConnection;
use crate::worker::journal::descriptors::Key;

impl Worker {
    /// Begins to record the worker's state, and continues with the connections of an earlier
    /// worker.
    pub fn adopt(&mut self, anchored: Anchored) -> Result<()> {
        let continues = anchored.position().is_some();
        let Adopted { recorder, session, rewrites_answer, control, programs: adopted } =
            anchored.adopt_connections()?;
        self.function.adopt_recording(recorder, rewrites_answer);
        for (id, socket) in control {
            self.control.insert(id, ControlConnection::new(socket));
            self.next_control = self.next_control.max(id.saturating_add(1));
        }
        if continues {
            let user = session.as_ref().map(|(_, vm)| format!(" for process {}", vm.pid));
            log::info!("Continues another worker's work{}", user.unwrap_or_default());
            self.function.note_unmask_event();
            // What the worker before had taken, and not recorded, is pending again.
            self.function.inner_mut().on_gpu_event();
        }
        if let Some(programs) = &mut self.programs {
            programs.adopt(&mut self.function, adopted, peer)?;
        }
        self.attached =
            session.map(|(session, client)| Attached { session, client, interest: Interest::READ });
        self.function.commit();
        let has_message = self.attached.as_ref().is_some_and(|it| it.session.has_input());
        if let Some(recorder) = &mut self.function.recorder {
            recorder.begin_queue(has_message);
        }
        Ok(())
    }

    /// Watches the connections that were there before.
    pub(super) fn watch_resumed(&mut self, ops: &mut EventOps) {
        if let Some(attached) = &self.attached {
            watch(ops, &attached.session, source::SESSION, event_set(attached.interest));
        }
        for (id, connection) in &self.control {
            watch(ops, connection, *id, EventSet::IN);
        }
        self.watch_unmask(ops);
        self.watch_gpu(ops);
        self.adopt_programs(ops);
    }

    /// Records the state after an event. A session records each message itself, and programs each
    /// of their events.
    pub(super) fn record(&mut self, event: u32) {
        // While one process of the VM follows another, a part of the state is in this process
        // alone.
        let Some(recorder) = &mut self.function.recorder else { return };
        recorder.set_blocked(self.outgoing.is_some());
        if self.attached.is_none() && self.outgoing.is_none() {
            recorder.end_session();
        }
        let is_of_program = event == source::PROGRAMS_LISTENER || event & source::PROGRAMS != 0;
        if !is_of_program && (event != source::SESSION || self.attached.is_none()) {
            self.function.commit();
        }
        // A manager that has attached is another position of the client.
        if (source::CONTROL..source::PROGRAMS).contains(&event)
            && let (Some(recorder), function) = self.function.recording()
        {
            recorder.notify_queue(function);
        }
    }

    /// Records that a VM attaches.
    pub(super) fn begin_session(&mut self, attached: &Attached) {
        if let Some(recorder) = &mut self.function.recorder {
            recorder.keep(Key::SESSION, attached.session.as_fd());
            recorder.begin_session(attached.client);
        }
    }

    /// Records the session of a process again whose successor had begun one in its place. Until the
    /// next record no other worker continues.
    pub(super) fn return_to_session(&mut self, attached: &Attached) {
        let (recorder, function) = self.function.recording();
        let Some(recorder) = recorder else { return };
        let Some(standing) = attached.session.standing() else {
            return recorder.give_session_up();
        };
        recorder.return_to_session(attached.client, standing);
        recorder.keep(Key::SESSION, attached.session.as_fd());
        function.descriptors(|what, fd| recorder.keep(Key::of(what), fd));
    }

    /// Lets no other worker continue during a request of several steps, until the next record.
    pub(super) fn block(&mut self) {
        if let Some(recorder) = &mut self.function.recorder {
            recorder.set_blocked(true);
        }
    }
}
