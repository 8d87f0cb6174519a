//! `top`: who asked for how much of a GPU and who gets it, as it happens.
//!
//! * [`app`]: what is known, and what keys do
//! * [`view`]: how that looks
//! * [`terminal`]: keys, and the terminal's end

mod app;
mod terminal;
#[cfg(test)]
mod tests;
mod view;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::Event;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{sleep_until, timeout};
use vfio_user_server::api::model::Stats;

use self::app::App;
use self::terminal::Happening;
use crate::cli::Top;
use crate::client::Client;
use crate::failure::Failure;

/// How long an answer is waited for before the screen says that there is none.
const PATIENCE: Duration = Duration::from_secs(2);

/// Shows what goes on until the user has seen enough.
pub async fn top(client: &Client, args: Top) -> Result<Vec<u8>, Failure> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let what = "top draws on a terminal, and there is none; use `vgpuctl stats`";
        return Err(Failure::Usage(what.to_owned()));
    }
    // Whoever cannot be reached at first gets the same line as with any other command.
    let first: Stats = client.get("/v1/stats").await?;
    let broken = |error: io::Error| Failure::Local(format!("Cannot use the terminal: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(broken)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(broken)?;
    let mut terminal = ratatui::try_init().map_err(broken)?;
    let shown = tokio::select! {
        shown = watch(&mut terminal, client, first, &args) => shown,
        _ = terminate.recv() => Ok(()),
        _ = hangup.recv() => Ok(()),
    };
    let _ = terminal.show_cursor();
    let _ = ratatui::try_restore();
    // Its end would complain, and panic where nobody is left to complain to.
    std::mem::forget(terminal);
    match shown {
        Err(error) if !terminal::has_ended() => Err(broken(error)),
        _ => Ok(Vec::new()),
    }
}

/// Until a key says that it is enough, or the terminal is gone.
async fn watch(
    terminal: &mut DefaultTerminal,
    client: &Client,
    first: Stats,
    args: &Top,
) -> io::Result<()> {
    let mut happenings = terminal::listen()?;
    let mut app = App::new(args.parent.clone());
    app.take(first, Instant::now());
    loop {
        let next = Instant::now() + Duration::from_millis(args.interval);
        terminal.draw(|frame| view::draw(frame, &mut app))?;
        let next = sleep_until(next.into());
        tokio::pin!(next);
        loop {
            tokio::select! {
                happened = happenings.recv() => match happened {
                    Some(Happening::Event(Event::Key(key))) if app.key(key) => return Ok(()),
                    Some(Happening::Event(_)) => {}
                    Some(Happening::Broken(error)) => return Err(error),
                    Some(Happening::End) | None => return Ok(()),
                },
                () = &mut next => break,
            }
            terminal.draw(|frame| view::draw(frame, &mut app))?;
        }
        match timeout(PATIENCE, client.get("/v1/stats")).await {
            Ok(Ok(stats)) => app.take(stats, Instant::now()),
            Ok(Err(failure)) => app.lose(failure.to_string()),
            Err(_) => app.lose("vgpud does not answer".to_owned()),
        }
    }
}
