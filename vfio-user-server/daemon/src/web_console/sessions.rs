//! Tickets and sessions of the web console.
//!
//! A ticket is a secret that opens one session, once, within minutes. `vgpuctl web` prints it in
//! the fragment of a URL, which browsers do not send to servers. The page exchanges the ticket for
//! the session's secret, keeps the secret and sends it with each request. There are no cookies:
//! browsers send cookies to every port of a host, thus to other users' servers, and with requests
//! that other sites cause.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, header};
use mdev_core::ids::VgpuId;
use subtle::ConstantTimeEq;

use vgpud_api::{ErrorCode, ErrorDetail};

/// Lifetime of a ticket.
const TICKET_LIFETIME: Duration = Duration::from_secs(300);

/// Lifetime of a session without requests.
const IDLE_LIFETIME: Duration = Duration::from_secs(12 * 3600);

/// Limit of tickets, and of sessions. A new one replaces the oldest.
const MAX_ENTRIES: usize = 64;

/// WebSocket protocol of a screen.
pub const SCREEN_PROTOCOL: &str = "tessera-rfb";

/// Prefix of the WebSocket protocol in which a browser passes the session's secret.
const SECRET_PROTOCOL: &str = "tessera-session.";

/// QMP monitors of VMs by vGPU: a session has keyboard and pointer for these vGPUs.
pub type Monitors = BTreeMap<VgpuId, String>;

type Result<T> = std::result::Result<T, ErrorDetail>;

/// Random secret.
struct Secret([u8; 32]);

impl Secret {
    fn new() -> Result<Self> {
        let mut bytes = [0; 32];
        let no_random = |error| ErrorDetail::new(ErrorCode::Internal, error);
        getrandom::fill(&mut bytes).map_err(no_random)?;
        Ok(Self(bytes))
    }

    fn text(&self) -> String {
        self.0.iter().fold(String::new(), |mut text, byte| {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        let digits = text.as_bytes();
        if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let pair = std::str::from_utf8(pair).ok()?;
            *byte = u8::from_str_radix(pair, 16).ok()?;
        }
        Some(Self(bytes))
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// Secret of a ticket or a session, with what the session may use.
#[derive(Debug)]
struct Entry {
    /// Number that no other entry has.
    number: u32,
    secret: Secret,
    expires: Instant,
    monitors: Arc<Monitors>,
}

/// Tickets, or sessions, by age.
#[derive(Debug, Default)]
struct Entries {
    list: Vec<Entry>,
    added: u32,
}

impl Entries {
    /// Adds an entry and returns its secret.
    fn add(&mut self, lifetime: Duration, monitors: Arc<Monitors>) -> Result<String> {
        let secret = Secret::new()?;
        let text = secret.text();
        if self.list.len() == MAX_ENTRIES {
            self.list.remove(0);
        }
        self.added = self.added.wrapping_add(1);
        let (number, expires) = (self.added, Instant::now() + lifetime);
        self.list.push(Entry { number, secret, expires, monitors });
        Ok(text)
    }

    /// Returns the index of the entry with a secret. The time of the search does not depend on the
    /// secrets.
    fn find(&mut self, text: &str) -> Option<usize> {
        let now = Instant::now();
        self.list.retain(|entry| entry.expires > now);
        let secret = Secret::parse(text)?;
        let mut found = None;
        for (index, entry) in self.list.iter().enumerate() {
            if bool::from(entry.secret.0.ct_eq(&secret.0)) {
                found = Some(index);
            }
        }
        found
    }
}

/// Tickets and sessions of a console. They end with the manager.
#[derive(Debug)]
pub struct Sessions {
    address: SocketAddr,
    tickets: Mutex<Entries>,
    active: Mutex<Entries>,
    /// Why the console does not listen.
    failure: Mutex<Option<String>>,
}

impl Sessions {
    /// Creates the sessions of a console at `address`, without any yet.
    pub fn new(address: SocketAddr) -> Self {
        Self {
            address,
            tickets: Mutex::default(),
            active: Mutex::default(),
            failure: Mutex::default(),
        }
    }

    fn tickets(&self) -> MutexGuard<'_, Entries> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sessions(&self) -> MutexGuard<'_, Entries> {
        self.active.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the address of the console.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Records why the console does not listen, or that it does.
    pub fn set_failure(&self, reason: Option<String>) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = reason;
    }

    /// Creates a ticket, and returns the URL that opens a session with it. Fails while the console
    /// does not listen.
    pub fn create_ticket(&self, monitors: Monitors) -> Result<String> {
        if let Some(reason) = &*self.failure.lock().unwrap_or_else(PoisonError::into_inner) {
            let message = format!(
                "The web console cannot listen on {}: {reason}; end the program that has the port, or start vgpud with another --web",
                self.address
            );
            return Err(ErrorDetail::new(ErrorCode::Unavailable, message));
        }
        let ticket = self.tickets().add(TICKET_LIFETIME, Arc::new(monitors))?;
        Ok(format!("http://{}/#ticket={ticket}", self.address))
    }

    /// Exchanges a ticket for a session, and returns the session's secret.
    pub fn open(&self, ticket: &str) -> Result<String> {
        let entry = {
            let mut tickets = self.tickets();
            tickets.find(ticket).map(|index| tickets.list.remove(index))
        };
        match entry {
            Some(entry) => self.sessions().add(IDLE_LIFETIME, entry.monitors),
            None => Err(ErrorDetail::new(
                ErrorCode::Invalid,
                "This address was used already, or is too old; get a new one with vgpuctl web",
            )),
        }
    }

    /// Returns number and monitors of a request's session, and extends the session's lifetime.
    pub fn find(&self, headers: &HeaderMap) -> Option<(u32, Arc<Monitors>)> {
        let secret = secret(headers)?;
        let mut sessions = self.sessions();
        let index = sessions.find(secret)?;
        let session = &mut sessions.list[index];
        session.expires = Instant::now() + IDLE_LIFETIME;
        Some((session.number, Arc::clone(&session.monitors)))
    }
}

/// Returns the session's secret from a request's headers.
fn secret(headers: &HeaderMap) -> Option<&str> {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    if let Some(bearer) = text(header::AUTHORIZATION) {
        return bearer.strip_prefix("Bearer ");
    }
    let protocols = text(header::SEC_WEBSOCKET_PROTOCOL)?;
    protocols.split(',').find_map(|name| name.trim().strip_prefix(SECRET_PROTOCOL))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sessions() -> Sessions {
        Sessions::new("127.0.0.1:8006".parse().unwrap())
    }

    fn headers(list: &[(HeaderName, &str)]) -> HeaderMap {
        list.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
    }

    fn ticket(sessions: &Sessions) -> String {
        let url = sessions.create_ticket(Monitors::new()).unwrap();
        url.strip_prefix("http://127.0.0.1:8006/#ticket=").unwrap().to_owned()
    }

    #[test]
    fn a_ticket_opens_one_session_once() {
        let sessions = sessions();
        let ticket = ticket(&sessions);
        let session = sessions.open(&ticket).unwrap();
        assert!(sessions.open(&ticket).is_err(), "a second time");
        assert!(sessions.open(&session).is_err(), "a session is not a ticket");
        let bearer =
            |secret: &str| headers(&[(header::AUTHORIZATION, &format!("Bearer {secret}"))]);
        assert!(sessions.find(&bearer(&session)).is_some());
        let upper = session.to_uppercase();
        assert!(sessions.find(&bearer(&upper)).is_some(), "the same secret");
        for wrong in [&ticket, "", "0", &"0".repeat(64), &session[1..], &format!("{session}0")] {
            assert!(sessions.find(&bearer(wrong)).is_none(), "{wrong:?}");
        }
        assert!(sessions.find(&HeaderMap::new()).is_none());
        let socket = format!("{SCREEN_PROTOCOL}, {SECRET_PROTOCOL}{session}");
        assert!(sessions.find(&headers(&[(header::SEC_WEBSOCKET_PROTOCOL, &socket)])).is_some());
    }

    #[test]
    fn oldest_ticket_is_replaced() {
        let sessions = sessions();
        let first = ticket(&sessions);
        for _ in 0..MAX_ENTRIES {
            ticket(&sessions);
        }
        assert_eq!(sessions.tickets().list.len(), MAX_ENTRIES);
        assert!(sessions.open(&first).is_err(), "the oldest was replaced");
    }
}
