//! Adoption of an earlier worker's programs.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result, ensure};
use cuda_socket::MAX_PACKET;
use ipc::seqpacket::SeqPacket;
use mdev_core::ids::Token;
use programs::change_map::ChangeMap;
use programs::front_end::MemoryFileId;
use programs::guest_memory::FreedPages;
use vgpud_api::AttachedClient;

use super::requests::number_of;
use super::{Changes, Programs, Source};
use crate::worker::anchored::{AdoptedPrograms, MAX_ATTEMPTS};
use crate::worker::function::Function;
use crate::worker::journal::JournaledPrograms;
use crate::worker::journal::descriptors::{Key, ProgramDescriptors};

/// What an earlier worker may have begun.
#[derive(Debug)]
pub(super) struct Begun {
    /// What it served.
    source: Source,
    /// Descriptors of the recorded reply, in order.
    reply: Vec<OwnedFd>,
    /// Workers die at this request: its process is cut off.
    is_given_up: bool,
    /// New connections, which are not recorded.
    arrived: BTreeMap<Source, SeqPacket>,
}

/// Returns whether a program has sent something on a socket, or has closed it.
fn has_input(socket: &SeqPacket) -> bool {
    match socket.try_peek(&mut [0]) {
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        Ok(_) => true,
    }
}

impl Programs {
    /// Adopts the programs of an earlier worker. `peer` returns the process of a
    /// connection.
    ///
    /// # Errors
    ///
    /// Fails if the recorded state is damaged, or workers die of it.
    pub fn adopt(
        &mut self,
        function: &mut Function,
        adopted: AdoptedPrograms,
        peer: impl Fn(&SeqPacket) -> AttachedClient,
    ) -> Result<()> {
        let AdoptedPrograms { recorded, mut kept, served } = adopted;
        self.front_end = self.create_front_end(function)?;
        if let Some(recorded) = recorded {
            self.adopt_recorded(recorded, &mut kept, peer)?;
            self.start_doorbell(function);
            // The worker before may have seen a ring, and not have passed it on.
            if let Err(error) = function.inner_mut().client().wake(Token(0)) {
                log::debug!("The GPU refused a wake-up: {error}");
            }
        }
        let Some(recorder) = function.programs_recorder() else { return Ok(()) };
        let mut arrived = BTreeMap::new();
        for (number, fd) in kept.connections {
            if Source(number) > self.last {
                arrived.insert(Source(number), SeqPacket::from(fd));
            } else {
                recorder.drop_now(Key::connection(number));
            }
        }
        kept.files.into_keys().for_each(|number| recorder.drop_now(Key::file(number)));
        recorder.set_unfinished(kept.memory);
        let source = u32::try_from(served.saturating_sub(1)).map_or(Source(0), Source);
        let connection = self.connections.get(&source).map(|connection| &connection.socket);
        let socket = connection.or_else(|| Some(&self.files.get(&source)?.1));
        let mut is_given_up = false;
        if socket.is_some_and(has_input) {
            is_given_up = recorder.count_attempt() > MAX_ATTEMPTS;
            ensure!(
                !is_given_up || connection.is_some(),
                "Workers die at the end of the same file of a program"
            );
        }
        self.begun = Some(Begun { source, reply: kept.reply, is_given_up, arrived });
        Ok(())
    }

    fn adopt_recorded(
        &mut self,
        recorded: JournaledPrograms,
        kept: &mut ProgramDescriptors,
        peer: impl Fn(&SeqPacket) -> AttachedClient,
    ) -> Result<()> {
        let take = &mut |file: MemoryFileId| kept.memory.remove(&file.0);
        let adopted = self.front_end.adopt(&recorded.front_end, &FreedPages::default(), take);
        adopted.context("The programs cannot continue")?;
        let mut connections = BTreeMap::new();
        for (source, greeted) in recorded.connections {
            let socket = kept.connections.remove(&source.0);
            let socket = SeqPacket::from(socket.context("A program's connection is lost")?);
            let process = peer(&socket);
            connections.insert(source, self.connection(source, socket, process, greeted));
        }
        let mut files = BTreeMap::new();
        for (source, file) in recorded.files {
            let socket = kept.files.remove(&source.0).context("A program's file is lost")?;
            ensure!(self.front_end.node(file.id).is_some(), "A program's file is unknown");
            files.insert(source, (file, SeqPacket::from(socket)));
        }
        ensure!(self.front_end.open_files().len() == files.len(), "A file has no program");
        self.connections = ChangeMap::unchanged(connections);
        self.files = ChangeMap::unchanged(files);
        (self.last, self.answer) = (recorded.last, recorded.answer);
        Ok(())
    }

    /// Returns the connections and files, to watch.
    pub fn sources(&self) -> Vec<Source> {
        self.connections.keys().chain(self.files.keys()).copied().collect()
    }

    /// Finishes what an earlier worker may have begun, before all other calls of the GPU: these
    /// then have the same numbers as before. Returns the connections that had arrived besides.
    pub fn finish_begun(
        &mut self,
        function: &mut Function,
    ) -> (Changes, BTreeMap<Source, SeqPacket>) {
        let mut changes = Changes::default();
        let Some(Begun { source, reply, is_given_up, arrived }) = self.begun.take() else {
            return (changes, BTreeMap::new());
        };
        let were_present = self.are_present();
        if self.files.contains_key(&source) {
            self.on_file(function, source, &mut changes);
        } else {
            let finished = if is_given_up {
                Err(io::Error::other("workers die at its request"))
            } else {
                self.finish_request(function, source, reply, &mut changes)
            };
            if let Err(error) = finished {
                self.remove(function, source, &error, &mut changes);
            }
        }
        self.answer = None;
        self.end_event(function, were_present);
        if let Some(recorder) = function.programs_recorder() {
            recorder.end_attempts();
        }
        (changes, arrived)
    }

    /// Notes that a connection which had arrived is admitted, under whichever number, or refused.
    /// Until then the anchor keeps it under the number that the worker before gave it.
    pub fn end_arrival(&self, function: &mut Function, source: Source) {
        if !self.connections.contains_key(&source)
            && let Some(recorder) = function.programs_recorder()
        {
            recorder.drop_now(Key::connection(source.0));
        }
    }

    /// Sends the recorded reply to the request at hand, or carries the request out.
    fn finish_request(
        &mut self,
        function: &mut Function,
        source: Source,
        reply: Vec<OwnedFd>,
        changes: &mut Changes,
    ) -> io::Result<()> {
        let Some(connection) = self.connections.get(&source) else { return Ok(()) };
        let mut packet = vec![0; MAX_PACKET];
        let next = match connection.socket.try_peek(&mut packet) {
            Ok(Some(next)) => Some(number_of(&packet[..next.len])),
            _ => None,
        };
        if let Some(answer) = &self.answer
            && answer.connection == source
            && next == Some(answer.number)
        {
            let mut reply = reply;
            reply.truncate(answer.descriptors);
            if reply.len() < answer.descriptors {
                return Err(io::Error::other("descriptors of its reply are lost"));
            }
            return self.send_answer(function, reply, true);
        }
        match self.next_request(source)? {
            Some(incoming) => self.serve(function, source, incoming, changes),
            None => Ok(()),
        }
    }
}
