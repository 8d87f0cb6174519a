//! `top`: live shares of vGPUs on the terminal.
//!
//! * [`app`]: state and key bindings
//! * [`view`]: contents of the screen
//! * [`terminal`]: events of the terminal

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
use vgpud_api::Stats;

use self::app::App;
use self::terminal::TerminalEvent;
use crate::cli::Top;
use crate::failure::Failure;
use vgpud_client::Client;

/// Timeout of a request for statistics. A timeout is shown on the screen.
const STATS_TIMEOUT: Duration = Duration::from_secs(2);

/// Shows live shares until the user quits or the terminal closes.
pub async fn top(client: &Client, args: Top) -> Result<Vec<u8>, Failure> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let message = "top requires a terminal; use `vgpuctl stats`";
        return Err(Failure::Usage(message.to_owned()));
    }
    // If vgpud cannot be reached, fail as other commands do, before drawing.
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
    // Dropping the terminal writes to it, and panics if it is closed.
    std::mem::forget(terminal);
    match shown {
        Err(error) if !terminal::is_closed() => Err(broken(error)),
        _ => Ok(Vec::new()),
    }
}

/// Draws and handles events until a key quits or the terminal closes.
async fn watch(
    terminal: &mut DefaultTerminal,
    client: &Client,
    first: Stats,
    args: &Top,
) -> io::Result<()> {
    let mut events = terminal::listen()?;
    let mut app = App::new(args.parent.clone());
    app.update(first, Instant::now());
    loop {
        let next = Instant::now() + Duration::from_millis(args.interval);
        terminal.draw(|frame| view::draw(frame, &mut app))?;
        let next = sleep_until(next.into());
        tokio::pin!(next);
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Some(TerminalEvent::Input(Event::Key(key))) if app.key(key) => return Ok(()),
                    Some(TerminalEvent::Input(_)) => {}
                    Some(TerminalEvent::Broken(error)) => return Err(error),
                    Some(TerminalEvent::Closed) | None => return Ok(()),
                },
                () = &mut next => break,
            }
            terminal.draw(|frame| view::draw(frame, &mut app))?;
        }
        match timeout(STATS_TIMEOUT, client.get("/v1/stats")).await {
            Ok(Ok(stats)) => app.update(stats, Instant::now()),
            Ok(Err(failure)) => app.set_error(failure.to_string()),
            Err(_) => app.set_error("vgpud does not answer".to_owned()),
        }
    }
}
