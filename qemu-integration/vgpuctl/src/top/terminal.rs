//! Events of the terminal: input and hangup.
//!
//! Two threads wait for them. Reading a closed terminal does not report the hangup, so a separate
//! thread polls for it.

use std::io;
use std::os::fd::AsFd;
use std::thread;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ratatui::crossterm::event::{self, Event};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Event of the terminal.
#[derive(Debug)]
pub enum TerminalEvent {
    /// Input, for example a key or a new size.
    Input(Event),
    /// Hangup of the terminal.
    Closed,
    /// Error of reading.
    Broken(io::Error),
}

/// Starts the threads, which end with the program.
pub fn listen() -> io::Result<UnboundedReceiver<TerminalEvent>> {
    let (sender, receiver) = unbounded_channel();
    let hangup = sender.clone();
    thread::Builder::new().name("hangup".into()).spawn(move || {
        while !closes_within(PollTimeout::NONE) {}
        hangup.send(TerminalEvent::Closed)
    })?;
    thread::Builder::new().name("keys".into()).spawn(move || read(&sender))?;
    Ok(receiver)
}

/// Sends input until the receiver is dropped or reading fails.
fn read(sender: &UnboundedSender<TerminalEvent>) {
    loop {
        let event = match event::read() {
            Ok(event) => TerminalEvent::Input(event),
            Err(_) if is_closed() => TerminalEvent::Closed,
            Err(error) => TerminalEvent::Broken(error),
        };
        let last = !matches!(event, TerminalEvent::Input(_));
        if sender.send(event).is_err() || last {
            return;
        }
    }
}

/// Returns whether the terminal is closed.
pub fn is_closed() -> bool {
    closes_within(PollTimeout::ZERO)
}

fn closes_within(limit: PollTimeout) -> bool {
    let stdin = io::stdin();
    // Without requested events, poll reports only hangup and errors.
    let mut terminal = [PollFd::new(stdin.as_fd(), PollFlags::empty())];
    !matches!(poll(&mut terminal, limit), Ok(0) | Err(Errno::EINTR))
}
