//! `top`: who asked for how much of a GPU and who gets it, as it happens.
//!
//! * [`app`]: what is known, and what keys do
//! * [`view`]: how that looks

mod app;
#[cfg(test)]
mod tests;
mod view;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use tokio::signal::unix::{Signal, SignalKind, signal};
use vfio_user_server::api::model::Stats;

use self::app::App;
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
    let mut ends = [
        signal(SignalKind::terminate()).map_err(broken)?,
        signal(SignalKind::hangup()).map_err(broken)?,
    ];
    let mut terminal = ratatui::try_init().map_err(broken)?;
    let shown = watch(&mut terminal, client, first, &args, &mut ends).await;
    ratatui::restore();
    shown.map_err(broken).map(|()| Vec::new())
}

async fn watch(
    terminal: &mut DefaultTerminal,
    client: &Client,
    first: Stats,
    args: &Top,
    ends: &mut [Signal],
) -> io::Result<()> {
    let mut app = App::new(args.parent.clone());
    app.take(first, Instant::now());
    loop {
        let next = Instant::now() + Duration::from_millis(args.interval);
        terminal.draw(|frame| view::draw(frame, &mut app))?;
        while event::poll(next.saturating_duration_since(Instant::now()))? {
            match event::read()? {
                Event::Key(key) if app.key(key) => return Ok(()),
                _ => {}
            }
            terminal.draw(|frame| view::draw(frame, &mut app))?;
        }
        for end in &mut *ends {
            if tokio::time::timeout(Duration::ZERO, end.recv()).await.is_ok() {
                return Ok(());
            }
        }
        match tokio::time::timeout(PATIENCE, client.get("/v1/stats")).await {
            Ok(Ok(stats)) => app.take(stats, Instant::now()),
            Ok(Err(failure)) => app.lose(failure.to_string()),
            Err(_) => app.lose("vgpud does not answer".to_owned()),
        }
    }
}
