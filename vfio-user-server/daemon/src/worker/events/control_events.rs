//! Connections of the manager: requests, and their answers.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use event_manager::{EventOps, EventSet};
use log::Level;
use mdev_core::device::{SaveError, VirtualFunction};

use super::{Worker, peer, source, unwatch, watch};
use crate::worker::End;
use crate::worker::control::ControlConnection;
use crate::worker::journal::Recorder;
use crate::worker::journal::descriptors::Key;
use crate::worker::programs::Programs;
use crate::worker::saving;
use crate::worker_protocol::{OLDEST, VERSION, WorkerReply, WorkerRequest, WorkerStatus};

/// Limit of connections to the control socket. The manager holds one; the others are short queries.
const MAX_CONTROL: usize = 8;

impl Worker {
    pub(super) fn accept_control(&mut self, ops: &mut EventOps) {
        let socket = match self.control_listener.accept() {
            Ok(socket) => socket,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                self.log_limited(Level::Warn, format_args!("Cannot accept the manager: {error}"));
                self.pause_listeners(ops);
                return;
            }
        };
        let uid = peer(&socket).uid;
        if uid != 0 && uid != self.spec.manager {
            let manager = self.spec.manager;
            let line = format_args!("User {uid} is refused: user {manager} manages the vGPU");
            self.log_limited(Level::Warn, line);
            return;
        }
        if self.control.len() >= MAX_CONTROL {
            log::warn!("More than {MAX_CONTROL} control connections; the new one is refused");
            return;
        }
        let id = self.next_control;
        self.next_control = self.next_control.checked_add(1).unwrap_or(source::CONTROL);
        let connection = ControlConnection::new(socket);
        if watch(ops, &connection, id, EventSet::IN) {
            if let Some(recorder) = &mut self.function.recorder {
                recorder.keep(Key::control(id), connection.as_fd());
            }
            self.control.insert(id, connection);
        }
    }

    pub(super) fn on_control(&mut self, id: u32, ops: &mut EventOps) {
        let Some(connection) = self.control.get(&id) else { return };
        let served = match connection.receive() {
            Ok(None) => Ok(false),
            Ok(Some((request, fd))) => {
                let (reply, fds) = self.answer(&request, fd, ops);
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                if let (WorkerReply::Done, Some(end)) = (&reply, End::of(&request)) {
                    self.end = Some(end);
                }
                let connection = self.control.get(&id);
                connection.map_or(Ok(()), |it| it.reply(&reply, &fds)).map(|()| true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
            Err(error) => Err(error),
        };
        if let Ok(true) = served {
            return;
        }
        if let Err(error) = served {
            log::warn!("A control connection is cut off: {error}");
        }
        if let Some(connection) = self.control.remove(&id) {
            unwatch(ops, &connection);
            if let Some(recorder) = &mut self.function.recorder {
                // No state needs it, and where nothing is recorded, there is no next state.
                recorder.drop_now(Key::control(id)..=Key::control(id));
            }
        }
    }

    /// Returns the reply to a request, and its descriptors.
    fn answer(
        &mut self,
        request: &WorkerRequest,
        fd: Option<OwnedFd>,
        ops: &mut EventOps,
    ) -> (WorkerReply, Vec<OwnedFd>) {
        let answered = match request {
            WorkerRequest::Status { .. } => {
                Ok((WorkerReply::Status(Box::new(self.status())), Vec::new()))
            }
            WorkerRequest::Scanout => self.scanout(),
            WorkerRequest::Attach => attach(self.function.inner_mut(), fd),
            WorkerRequest::Stop => Ok(done()),
            WorkerRequest::Leave => self.leave().map(|()| done()),
            WorkerRequest::BeginHandover
            | WorkerRequest::Adopt
            | WorkerRequest::AbandonHandover => self.answer_handover(request, ops),
            WorkerRequest::Resume => {
                self.end_handover(ops).and_then(|()| self.answer_saving(request, fd))
            }
            WorkerRequest::CheckSave
            | WorkerRequest::Pause
            | WorkerRequest::Save
            | WorkerRequest::Restore
            | WorkerRequest::Discard
            | WorkerRequest::Written { .. }
            | WorkerRequest::FillGuest
            | WorkerRequest::Checkpoint
            | WorkerRequest::CopyStaged(_) => self.answer_saving(request, fd),
            WorkerRequest::LogWrites { enabled } => self.log_writes(*enabled).map(|()| done()),
        };
        answered
            .unwrap_or_else(|error| (WorkerReply::Error { message: error.to_string() }, Vec::new()))
    }

    /// Refuses to leave where another worker could not continue.
    fn leave(&mut self) -> Result<()> {
        ensure!(
            self.function.recorder.is_some(),
            "The worker has the GPU for itself, and no other one can continue"
        );
        ensure!(self.outgoing.is_none(), "The vGPU is being handed over");
        self.function.commit();
        let recorder = self.function.recorder.as_ref();
        ensure!(
            recorder.is_some_and(Recorder::is_adoptable),
            "The vGPU is in a state from which no other worker can continue; try again"
        );
        Ok(())
    }

    /// Begins or ends a record of the vGPU's writes. An adopting worker has none.
    fn log_writes(&mut self, enabled: bool) -> Result<()> {
        let function = self.function.inner_mut();
        if !enabled {
            function.end_write_log();
            return Ok(());
        }
        self.check_programs()?;
        let function = self.function.inner_mut();
        function.check_saveable()?;
        Ok(function.begin_write_log()?)
    }

    fn answer_saving(
        &mut self,
        request: &WorkerRequest,
        fd: Option<OwnedFd>,
    ) -> Result<(WorkerReply, Vec<OwnedFd>)> {
        self.check_programs()?;
        if *request == WorkerRequest::Checkpoint {
            self.check_managed()?;
        }
        self.block();
        saving::answer(self.function.inner_mut(), request, fd)
    }

    /// Refuses to save a vGPU that CUDA programs of the host use.
    pub(super) fn check_programs(&self) -> Result<(), SaveError> {
        let present = self.programs.as_ref().is_some_and(Programs::are_present);
        if present { Err(SaveError::HostPrograms) } else { Ok(()) }
    }

    /// Refuses to checkpoint programs of the VM with managed memory: libcuda cannot do that, and
    /// leaves a program that it has begun to checkpoint without CUDA.
    fn check_managed(&self) -> Result<(), SaveError> {
        let status = self.programs.as_ref().and_then(Programs::status);
        match status.and_then(|status| status.with_managed) {
            Some(process) => Err(SaveError::Managed(process)),
            None => Ok(()),
        }
    }

    fn status(&self) -> WorkerStatus {
        let function = self.function.inner();
        let mut warnings = function.warnings();
        let lost = foreign_fds::backlog().lost_threads;
        if lost > 0 {
            let most = foreign_fds::MAX_CLOSING;
            warnings.push(format!(
                "{lost} of {most} threads wait for descriptors of its client to be closed; at {most}, it takes no client"
            ));
        }
        WorkerStatus {
            version: VERSION,
            pid: std::process::id(),
            spec: self.spec.clone(),
            client: self.user(),
            gpu_ok: function.gpu_ok(),
            traps: function.traps().into(),
            warnings,
            oldest: OLDEST,
            programs: self.programs.as_ref().and_then(Programs::status),
        }
    }

    fn scanout(&self) -> Result<(WorkerReply, Vec<OwnedFd>)> {
        let function = self.function.inner();
        let vram = function.vram().context("This vGPU's video memory cannot be read")?;
        let mut scanout = function.scanout();
        scanout.offset = scanout.offset.saturating_add(vram.offset);
        Ok((WorkerReply::Scanout(scanout), vec![vram.fd.try_clone_to_owned()?]))
    }
}

pub(super) fn done() -> (WorkerReply, Vec<OwnedFd>) {
    (WorkerReply::Done, Vec::new())
}

/// Hands a new manager's connection to the GPU to the device model.
fn attach(
    function: &mut VirtualFunction,
    fd: Option<OwnedFd>,
) -> Result<(WorkerReply, Vec<OwnedFd>)> {
    let fd = fd.context("Invalid argument: the connection is missing")?;
    function.attach_manager(fd)?;
    Ok(done())
}
