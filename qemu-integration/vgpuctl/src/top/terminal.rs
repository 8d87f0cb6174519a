//! What happens at the terminal: keys, and its end.
//!
//! Both are waited for on threads of their own. A terminal that is gone is read without end, and never says so to who
//! reads it.

use std::io;
use std::os::fd::AsFd;
use std::thread;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ratatui::crossterm::event::{self, Event};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// What happens at a terminal.
#[derive(Debug)]
pub enum Happening {
    /// A key, a new size.
    Event(Event),
    /// Whoever showed it has gone.
    End,
    /// It cannot be read.
    Broken(io::Error),
}

/// Begins to listen. The threads end with the program.
pub fn listen() -> io::Result<UnboundedReceiver<Happening>> {
    let (sender, receiver) = unbounded_channel();
    let end = sender.clone();
    thread::Builder::new().name("hangup".into()).spawn(move || {
        while !ends_within(PollTimeout::NONE) {}
        end.send(Happening::End)
    })?;
    thread::Builder::new().name("keys".into()).spawn(move || read(&sender))?;
    Ok(receiver)
}

/// Passes events on while there is somebody to take them.
fn read(sender: &UnboundedSender<Happening>) {
    loop {
        let happened = match event::read() {
            Ok(event) => Happening::Event(event),
            Err(_) if has_ended() => Happening::End,
            Err(error) => Happening::Broken(error),
        };
        let last = !matches!(happened, Happening::Event(_));
        if sender.send(happened).is_err() || last {
            return;
        }
    }
}

/// Whether it has gone.
pub fn has_ended() -> bool {
    ends_within(PollTimeout::ZERO)
}

fn ends_within(limit: PollTimeout) -> bool {
    let stdin = io::stdin();
    // Asked for nothing, the kernel says only that it is gone, or broken.
    let mut terminal = [PollFd::new(stdin.as_fd(), PollFlags::empty())];
    !matches!(poll(&mut terminal, limit), Ok(0) | Err(Errno::EINTR))
}
