//! Events of CUDA programs in a worker's event loop.

use std::io;

use event_manager::{EventOps, EventSet};
use log::Level;

use super::{Worker, peer, source, unwatch, watch};
use crate::worker::programs::{Changes, Source};
use vgpud_api::AttachedClient;

impl Worker {
    /// Accepts the connection of a program.
    pub(super) fn accept_program(&mut self, ops: &mut EventOps) {
        let Some(programs) = &mut self.programs else { return };
        let socket = match programs.listener().accept() {
            Ok(socket) => socket,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                self.log_limited(Level::Warn, format_args!("Cannot accept a program: {error}"));
                self.pause_listeners(ops);
                return;
            }
        };
        let process = peer(&socket);
        let AttachedClient { pid, uid } = process;
        let owner = self.spec.owner;
        if uid != 0 && uid != owner {
            let line = format_args!(
                "Process {pid} of user {uid} is refused: the vGPU belongs to user {owner}"
            );
            return self.log_limited(Level::Warn, line);
        }
        if let Some(attached) = &self.attached {
            let vm = attached.client.pid;
            let line =
                format_args!("Process {pid} is refused: the VM of process {vm} uses the vGPU");
            return self.log_limited(Level::Warn, line);
        }
        match programs.connect(self.function.inner_mut(), socket, process) {
            Ok(changes) => self.apply(ops, &changes),
            Err(reason) => {
                self.log_limited(Level::Warn, format_args!("Process {pid} is refused: {reason}"));
            }
        }
    }

    /// Serves a descriptor of a program.
    pub(super) fn on_program(&mut self, ops: &mut EventOps, source: Source) {
        if let Some(programs) = &mut self.programs {
            let changes = programs.on_ready(self.function.inner_mut(), source);
            self.apply(ops, &changes);
        }
    }

    /// Watches the descriptors of programs as they come and go.
    fn apply(&self, ops: &mut EventOps, changes: &Changes) {
        for descriptor in &changes.unwatch {
            unwatch(ops, descriptor);
        }
        for source in &changes.watch {
            if let Some(fd) = self.programs.as_ref().and_then(|all| all.descriptor(*source)) {
                watch(ops, &fd, source::PROGRAMS | source.0, EventSet::IN);
            }
        }
    }
}
