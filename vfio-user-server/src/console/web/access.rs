//! Who is let in.
//!
//! `vgpuctl web` gets a ticket: a secret that opens one session, once, within minutes. It travels in the part of an address
//! that browsers do not send anywhere; the page trades it for the session's secret, which it keeps to itself and sends
//! with each request. There are no cookies: a browser sends those to every port of a host, so another user's server on
//! the next port would get them, and it sends them along with what other sites ask for.
//!
//! A request whose `Host` is another name is not for us: a page of somebody's whose name was made to point here (DNS
//! rebinding). One that says it comes from another page is refused too.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use mdev_core::ids::VgpuId;
use subtle::ConstantTimeEq;

use crate::api::model::{ErrorCode, ErrorDetail};
use crate::manager::Result;

/// How long a ticket is good for.
const TICKET: Duration = Duration::from_secs(300);

/// Tickets at a time, and sessions: the oldest make room.
const MOST: usize = 64;

/// How long a session that asks for nothing lives.
const IDLE: Duration = Duration::from_secs(12 * 3600);

/// The protocol of a screen's WebSocket.
pub const SCREEN: &str = "tessera-rfb";

/// What a browser names beside it, with the session's secret.
const SECRET: &str = "tessera-session.";

/// Where the console is served: an address of this host's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address(pub SocketAddr);

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.parse::<SocketAddr>() {
            Ok(address) if address.ip().is_loopback() => Ok(Self(address)),
            Ok(address) => Err(format!(
                "{} is not an address of this host alone; give 127.0.0.1:{}, and reach it from elsewhere through ssh -L",
                address.ip(),
                address.port()
            )),
            Err(_) => Err("give an address and a port, for example 127.0.0.1:8006".to_owned()),
        }
    }
}

/// Monitors of VMs, by their vGPUs: keyboards that a session has.
pub type Monitors = BTreeMap<VgpuId, String>;

/// A secret that nobody guesses.
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
            // A String takes whatever is written to it.
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

/// A ticket or a session.
#[derive(Debug)]
struct Pass {
    secret: Secret,
    until: Instant,
    monitors: Arc<Monitors>,
}

/// Tickets and sessions. They are gone with the manager.
#[derive(Debug)]
pub struct Access {
    address: SocketAddr,
    passes: Mutex<[Vec<Pass>; 2]>,
}

const TICKETS: usize = 0;
const SESSIONS: usize = 1;

impl Access {
    /// For a console at this address.
    pub fn new(address: SocketAddr) -> Self {
        Self { address, passes: Mutex::default() }
    }

    fn passes(&self) -> MutexGuard<'_, [Vec<Pass>; 2]> {
        self.passes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, kind: usize, life: Duration, monitors: Arc<Monitors>) -> Result<String> {
        let secret = Secret::new()?;
        let text = secret.text();
        let passes = &mut self.passes()[kind];
        if passes.len() == MOST {
            passes.remove(0);
        }
        passes.push(Pass { secret, until: Instant::now() + life, monitors });
        Ok(text)
    }

    /// Where the pass with this secret is. All are compared, each in the same time whatever it is.
    fn find(passes: &mut Vec<Pass>, text: &str) -> Option<usize> {
        let now = Instant::now();
        passes.retain(|pass| pass.until > now);
        let secret = Secret::parse(text)?;
        let mut found = None;
        for (place, pass) in passes.iter().enumerate() {
            if bool::from(pass.secret.0.ct_eq(&secret.0)) {
                found = Some(place);
            }
        }
        found
    }

    /// An address that opens a session.
    pub fn ticket(&self, monitors: Monitors) -> Result<String> {
        let ticket = self.add(TICKETS, TICKET, Arc::new(monitors))?;
        Ok(format!("http://{}/#ticket={ticket}", self.address))
    }

    /// Trades a ticket for a session.
    pub fn enter(&self, ticket: &str) -> Result<String> {
        let pass = {
            let tickets = &mut self.passes()[TICKETS];
            Self::find(tickets, ticket).map(|place| tickets.remove(place))
        };
        match pass {
            Some(pass) => self.add(SESSIONS, IDLE, pass.monitors),
            None => Err(ErrorDetail::new(
                ErrorCode::Invalid,
                "This address was used already, or is too old; get a new one with vgpuctl web",
            )),
        }
    }

    /// What the session of a request may do.
    pub fn session(&self, headers: &HeaderMap) -> Option<Arc<Monitors>> {
        let secret = secret(headers)?;
        let sessions = &mut self.passes()[SESSIONS];
        let place = Self::find(sessions, secret)?;
        sessions[place].until = Instant::now() + IDLE;
        Some(Arc::clone(&sessions[place].monitors))
    }

    /// Whether a request is for this console, and from its own page if from any.
    fn is_ours(&self, headers: &HeaderMap) -> bool {
        let port = self.address.port();
        let hosts = [self.address.to_string(), format!("localhost:{port}")];
        let one = |name: HeaderName| {
            let mut values = headers.get_all(name).iter();
            (values.next().and_then(|value| value.to_str().ok()), values.next().is_none())
        };
        let (host, alone) = one(header::HOST);
        let Some(host) = host.filter(|host| alone && hosts.iter().any(|ours| ours == host)) else {
            return false;
        };
        match one(header::ORIGIN) {
            (None, _) => !headers.contains_key(header::ORIGIN),
            (Some(origin), alone) => alone && origin.strip_prefix("http://") == Some(host),
        }
    }
}

/// The session's secret in a request's headers.
fn secret(headers: &HeaderMap) -> Option<&str> {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    if let Some(bearer) = text(header::AUTHORIZATION) {
        return bearer.strip_prefix("Bearer ");
    }
    let protocols = text(header::SEC_WEBSOCKET_PROTOCOL)?;
    protocols.split(',').find_map(|one| one.trim().strip_prefix(SECRET))
}

/// Refuses what is not ours, and tells browsers what the page may do: nothing but be itself.
pub async fn guard(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    let mut response = if access.is_ours(request.headers()) {
        next.run(request).await
    } else {
        let what = "This console answers to its own address and its own page only\n";
        (StatusCode::MISDIRECTED_REQUEST, what).into_response()
    };
    for (name, value) in HEADERS {
        let (name, value) = (HeaderName::from_static(name), HeaderValue::from_static(value));
        response.headers_mut().insert(name, value);
    }
    response
}

const HEADERS: [(&str, &str); 7] = [
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn access() -> Access {
        Access::new("127.0.0.1:8006".parse().unwrap())
    }

    fn headers(list: &[(HeaderName, &str)]) -> HeaderMap {
        list.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
    }

    fn ticket(access: &Access) -> String {
        let url = access.ticket(Monitors::new()).unwrap();
        url.strip_prefix("http://127.0.0.1:8006/#ticket=").unwrap().to_owned()
    }

    #[test]
    fn a_ticket_opens_one_session_once() {
        let access = access();
        let ticket = ticket(&access);
        let session = access.enter(&ticket).unwrap();
        assert!(access.enter(&ticket).is_err(), "a second time");
        assert!(access.enter(&session).is_err(), "a session is no ticket");
        let bearer =
            |secret: &str| headers(&[(header::AUTHORIZATION, &format!("Bearer {secret}"))]);
        assert!(access.session(&bearer(&session)).is_some());
        let upper = session.to_uppercase();
        assert!(access.session(&bearer(&upper)).is_some(), "the same number");
        for wrong in [&ticket, "", "0", &"0".repeat(64), &session[1..], &format!("{session}0")] {
            assert!(access.session(&bearer(wrong)).is_none(), "{wrong:?}");
        }
        assert!(access.session(&HeaderMap::new()).is_none());
        let socket = format!("{SCREEN}, {SECRET}{session}");
        assert!(access.session(&headers(&[(header::SEC_WEBSOCKET_PROTOCOL, &socket)])).is_some());
    }

    #[test]
    fn there_are_never_more_than_so_many() {
        let access = access();
        let first = ticket(&access);
        for _ in 0..MOST {
            ticket(&access);
        }
        assert_eq!(access.passes()[TICKETS].len(), MOST);
        assert!(access.enter(&first).is_err(), "the oldest made room");
    }

    #[test]
    fn other_names_and_other_pages_are_refused() {
        let access = access();
        let ours = |list: &[(HeaderName, &str)]| access.is_ours(&headers(list));
        for host in ["127.0.0.1:8006", "localhost:8006"] {
            assert!(ours(&[(header::HOST, host)]), "{host}");
            assert!(ours(&[(header::HOST, host), (header::ORIGIN, &format!("http://{host}"))]));
        }
        for host in
            ["127.0.0.1", "127.0.0.1:80", "evil.example:8006", "localhost:8006.evil.example"]
        {
            assert!(!ours(&[(header::HOST, host)]), "{host}");
        }
        let good = (header::HOST, "localhost:8006");
        for origin in
            ["null", "https://localhost:8006", "http://localhost:8007", "http://evil.example"]
        {
            assert!(!ours(&[good.clone(), (header::ORIGIN, origin)]), "{origin}");
        }
        assert!(!ours(&[]));
        let mut twice = headers(&[good]);
        twice.append(header::HOST, "evil.example:8006".parse().unwrap());
        assert!(!access.is_ours(&twice));
    }

    #[test]
    fn only_addresses_of_this_host_are_taken() {
        assert!("127.0.0.1:8006".parse::<Address>().is_ok());
        assert!("[::1]:8006".parse::<Address>().is_ok());
        for other in ["0.0.0.0:8006", "192.0.2.1:80", "[::]:8006"] {
            let error = other.parse::<Address>().unwrap_err();
            assert!(error.contains("ssh -L"), "{error}");
        }
        assert!("8006".parse::<Address>().unwrap_err().contains("127.0.0.1:8006"));
    }
}
