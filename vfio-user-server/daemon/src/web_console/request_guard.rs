//! Check of the headers `Host` and `Origin`, and security headers of responses.
//!
//! A request with another `Host` comes from a page of a host name that resolves to this address
//! (DNS rebinding). A request with another `Origin` comes from another site's page. Both are
//! refused.

use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// Loopback address on which the web console is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address(pub SocketAddr);

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<SocketAddr>() {
            Ok(address) if address.ip().is_loopback() => Ok(Self(address)),
            Ok(address) => Err(format!(
                "{} is not a loopback address; give 127.0.0.1:{}, and connect from elsewhere through ssh -L",
                address.ip(),
                address.port()
            )),
            Err(_) => Err("give an address and a port, for example 127.0.0.1:8006".to_owned()),
        }
    }
}

/// Check that requests are for the console's own address and from its own page.
#[derive(Debug)]
pub struct RequestGuard {
    address: SocketAddr,
}

impl RequestGuard {
    /// Creates the check for a console at `address`.
    pub fn new(address: SocketAddr) -> Arc<Self> {
        Arc::new(Self { address })
    }

    /// Returns whether `Host` is the console's address and `Origin`, if present, its page.
    fn permits(&self, headers: &HeaderMap) -> bool {
        let port = self.address.port();
        let hosts = [self.address.to_string(), format!("localhost:{port}")];
        let single = |name: HeaderName| {
            let mut values = headers.get_all(name).iter();
            (values.next().and_then(|value| value.to_str().ok()), values.next().is_none())
        };
        let (host, is_single) = single(header::HOST);
        let Some(host) = host.filter(|host| is_single && hosts.iter().any(|own| own == host))
        else {
            return false;
        };
        match single(header::ORIGIN) {
            (None, _) => !headers.contains_key(header::ORIGIN),
            (Some(origin), is_single) => is_single && origin.strip_prefix("http://") == Some(host),
        }
    }
}

/// Refuses requests that the guard does not permit, and adds security headers to all responses.
pub async fn check(
    State(guard): State<Arc<RequestGuard>>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = if guard.permits(request.headers()) {
        next.run(request).await
    } else {
        let message = "This console accepts requests for its own address from its own page only\n";
        (StatusCode::MISDIRECTED_REQUEST, message).into_response()
    };
    for (name, value) in SECURITY_HEADERS {
        let (name, value) = (HeaderName::from_static(name), HeaderValue::from_static(value));
        response.headers_mut().insert(name, value);
    }
    response
}

const SECURITY_HEADERS: [(&str, &str); 7] = [
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

    fn headers(list: &[(HeaderName, &str)]) -> HeaderMap {
        list.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
    }

    #[test]
    fn other_hosts_and_origins_are_refused() {
        let guard = RequestGuard::new("127.0.0.1:8006".parse().unwrap());
        let permits = |list: &[(HeaderName, &str)]| guard.permits(&headers(list));
        for host in ["127.0.0.1:8006", "localhost:8006"] {
            assert!(permits(&[(header::HOST, host)]), "{host}");
            assert!(permits(&[(header::HOST, host), (header::ORIGIN, &format!("http://{host}"))]));
        }
        for host in
            ["127.0.0.1", "127.0.0.1:80", "evil.example:8006", "localhost:8006.evil.example"]
        {
            assert!(!permits(&[(header::HOST, host)]), "{host}");
        }
        let good = (header::HOST, "localhost:8006");
        for origin in
            ["null", "https://localhost:8006", "http://localhost:8007", "http://evil.example"]
        {
            assert!(!permits(&[good.clone(), (header::ORIGIN, origin)]), "{origin}");
        }
        assert!(!permits(&[]));
        let mut twice = headers(&[good]);
        twice.append(header::HOST, "evil.example:8006".parse().unwrap());
        assert!(!guard.permits(&twice));
    }

    #[test]
    fn only_loopback_addresses_are_accepted() {
        assert!("127.0.0.1:8006".parse::<Address>().is_ok());
        assert!("[::1]:8006".parse::<Address>().is_ok());
        for other in ["0.0.0.0:8006", "192.0.2.1:80", "[::]:8006"] {
            let error = other.parse::<Address>().unwrap_err();
            assert!(error.contains("ssh -L"), "{error}");
        }
        assert!("8006".parse::<Address>().unwrap_err().contains("127.0.0.1:8006"));
    }
}
