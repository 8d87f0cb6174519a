//! Events of CUDA programs in a worker's event loop.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Instant;

use cuda_socket::{Reply, encode};
use event_manager::{EventOps, EventSet, Events};
use ipc::seqpacket::SeqPacket;
use log::Level;
use mdev_core::gpu::Pending;
use nix::errno::Errno;

use super::{Worker, peer, source, unwatch, watch};
use crate::cpu_budget::thread_cpu_time;
use crate::worker::programs::{Changes, Source, Throttled};
use vgpud_api::AttachedClient;

/// Tells a process that it cannot use the vGPU. The reply is the same in all versions.
fn refuse(socket: &SeqPacket, errno: Errno) {
    if let Ok(packet) = encode(&Reply::Failed { errno: errno as i32 }) {
        let _ = socket.try_send(&packet, &[]);
    }
    socket.end();
}

impl Worker {
    /// Handles an event of the programs' listener, or of a descriptor of a program, and charges the
    /// CPU time that it takes, including the event loop's.
    pub(super) fn on_programs(&mut self, ops: &mut EventOps, source: Option<Source>) {
        let before = self.charged.unwrap_or_else(thread_cpu_time);
        match source {
            Some(source) => self.on_program(ops, source),
            None => self.accept_program(ops),
        }
        let after = thread_cpu_time();
        self.charged = Some(after);
        let used = after.saturating_sub(before);
        if let Some(programs) = &mut self.programs {
            let throttled = programs.charge(source, used, Instant::now());
            self.throttle(ops, &throttled);
        }
    }

    /// Serves programs that have waited for CPU time.
    pub(super) fn on_programs_timer(&mut self, ops: &mut EventOps) {
        if let Some(programs) = &mut self.programs {
            let throttled = programs.on_timer(Instant::now());
            self.throttle(ops, &throttled);
        }
    }

    /// Watches the sockets of programs whose requests do not wait, and no others: a socket that is
    /// watched reports its end all the time.
    fn throttle(&mut self, ops: &mut EventOps, throttled: &Throttled) {
        let Some(programs) = &self.programs else { return };
        for (source, _) in &throttled.begun {
            if let Some(fd) = programs.descriptor(*source) {
                unwatch(ops, &fd);
            }
        }
        for source in &throttled.ended {
            if let Some(fd) = programs.descriptor(*source) {
                watch(ops, &fd, source::PROGRAMS | source.0, EventSet::IN);
            }
        }
        if let Some(waits) = throttled.listener {
            let set = if waits { EventSet::empty() } else { EventSet::IN };
            let fd = programs.listener().as_fd().as_raw_fd();
            if let Err(error) =
                ops.modify(Events::with_data_raw(fd, source::PROGRAMS_LISTENER, set))
            {
                log::error!("Cannot watch a listener: {error}");
            }
        }
        for (_, pid) in &throttled.begun {
            let line = format_args!("Requests of process {pid} wait: it sends too many");
            self.log_limited(Level::Debug, line);
        }
    }

    /// Accepts the connection of a program.
    fn accept_program(&mut self, ops: &mut EventOps) {
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
        self.admit_program(ops, socket);
    }

    /// Admits the process of a new connection, or refuses it.
    fn admit_program(&mut self, ops: &mut EventOps, socket: SeqPacket) {
        let Some(programs) = &mut self.programs else { return };
        let process = peer(&socket);
        let AttachedClient { pid, uid } = process;
        let owner = self.spec.owner;
        if uid != 0 && uid != owner {
            refuse(&socket, Errno::EACCES);
            let line = format_args!(
                "Process {pid} of user {uid} is refused: the vGPU belongs to user {owner}"
            );
            return self.log_limited(Level::Warn, line);
        }
        if let Some(attached) = &self.attached {
            refuse(&socket, Errno::EBUSY);
            let vm = attached.client.pid;
            let line =
                format_args!("Process {pid} is refused: the VM of process {vm} uses the vGPU");
            return self.log_limited(Level::Warn, line);
        }
        if programs.is_full(pid) {
            refuse(&socket, Errno::EUSERS);
            let line = format_args!(
                "Process {pid} is refused: too many connections of its own, or of all processes"
            );
            return self.log_limited(Level::Warn, line);
        }
        let changes = programs.connect(&mut self.function, socket, process);
        self.apply(ops, &changes);
    }

    /// Finishes what an earlier worker has begun for programs, and watches them.
    pub(super) fn adopt_programs(&mut self, ops: &mut EventOps) {
        let Some(programs) = &mut self.programs else { return };
        for source in programs.sources() {
            if let Some(fd) = programs.descriptor(source) {
                watch(ops, &fd, source::PROGRAMS | source.0, EventSet::IN);
            }
        }
        let (changes, arrived) = programs.finish_begun(&mut self.function);
        self.apply(ops, &changes);
        let Some(programs) = &mut self.programs else { return };
        // What the worker before had taken, and not passed on, is pending again.
        programs.on_gpu_event(&mut self.function, Pending::NONSTALL | Pending::CHANNEL_ERROR);
        for (source, socket) in arrived {
            self.admit_program(ops, socket);
            if let Some(programs) = &self.programs {
                programs.end_arrival(&mut self.function, source);
            }
        }
    }

    /// Serves a descriptor of a program.
    fn on_program(&mut self, ops: &mut EventOps, source: Source) {
        if let Some(programs) = &mut self.programs {
            let changes = programs.on_ready(&mut self.function, source);
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
