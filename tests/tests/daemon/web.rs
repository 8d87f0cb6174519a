//! Access to the web console, tested without a browser. `qemu/browser` tests the pages.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use system_tests::vgpuctl::{refused, vgpuctl};
use system_tests::{TIMEOUT, Vgpud, vgpud, wait_for};

/// A console and its address.
struct Console {
    vgpud: Vgpud,
    address: String,
}

/// An answer: status, head in lower case, body.
struct Answer(u16, String, String);

impl Console {
    fn start() -> Result<Self> {
        let vgpud = Vgpud::start_with(&["--web", "127.0.0.1:0"])?;
        let url = vgpuctl(&vgpud, "web")?;
        let address = url.strip_prefix("http://").and_then(|rest| rest.split_once('/'));
        let address = address.context("An address")?.0.to_owned();
        Ok(Self { vgpud, address })
    }

    fn ticket(&self) -> Result<String> {
        let url = vgpuctl(&self.vgpud, "web")?;
        Ok(url.split_once("#ticket=").context("A ticket")?.1.to_owned())
    }

    fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> Result<Answer> {
        let mut socket = TcpStream::connect(&self.address)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        let host = format!("Host: {}\r\n", self.address);
        let host = if headers.contains("Host:") { "" } else { &host };
        write!(
            socket,
            "{method} {path} HTTP/1.1\r\n{host}{headers}Connection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let (head, body) = answer.split_once("\r\n\r\n").context("An answer")?;
        let status = head.split(' ').nth(1).context("A status")?.parse()?;
        Ok(Answer(status, head.to_lowercase(), body.to_owned()))
    }

    fn enter(&self, ticket: &str) -> Result<Answer> {
        let body = json!({ "ticket": ticket }).to_string();
        self.ask("POST", "/api/enter", "Content-Type: application/json\r\n", &body)
    }

    fn session(&self) -> Result<String> {
        let Answer(status, _, body) = self.enter(&self.ticket()?)?;
        assert_eq!(status, 200, "{body}");
        let body: Value = serde_json::from_str(&body)?;
        Ok(body["session"].as_str().context("A session")?.to_owned())
    }
}

#[test]
fn requests_without_a_session_are_refused() -> Result<()> {
    let console = Console::start()?;
    let uuid = console.vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))?;
    let session = console.session()?;
    let paths = [
        "/api/state/0/0".to_owned(),
        format!("/api/vgpus/{uuid}/thumbnail"),
        format!("/api/vgpus/{uuid}/screen"),
    ];
    let upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                   Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    let wrong = "0".repeat(64);
    for path in &paths {
        for headers in [
            upgrade.to_owned(),
            format!("{upgrade}Authorization: Bearer {wrong}\r\n"),
            format!("{upgrade}Authorization: {session}\r\n"),
            format!("{upgrade}Cookie: session={session}\r\n"),
            format!("{upgrade}Sec-WebSocket-Protocol: tessera-rfb, tessera-session.{wrong}\r\n"),
        ] {
            let Answer(status, _, body) = console.ask("GET", path, &headers, "")?;
            assert_eq!(status, 401, "{path} with {headers}: {body}");
            assert!(body.contains("This session has ended; get a new address"), "{body}");
            assert!(!body.contains(&uuid), "{body}");
        }
    }
    let headers = format!("Authorization: Bearer {session}\r\n");
    // Statistics are recorded every second, beginning with the first request.
    wait_for("the vGPU is reported", || {
        console.ask("GET", &paths[0], &headers, "").is_ok_and(|a| a.0 == 200 && a.2.contains(&uuid))
    })?;
    let Answer(status, head, _) = console.ask("GET", "/", "", "")?;
    assert_eq!(status, 200, "the page itself is public");
    assert!(!head.contains("set-cookie"), "{head}");
    for header in [
        "content-security-policy: default-src 'none'; script-src 'self'",
        "frame-ancestors 'none'",
        "x-content-type-options: nosniff",
        "cache-control: no-store",
        "referrer-policy: no-referrer",
    ] {
        assert!(head.contains(header), "{header}: {head}");
    }
    Ok(())
}

#[test]
fn a_ticket_is_valid_once() -> Result<()> {
    let console = Console::start()?;
    let ticket = console.ticket()?;
    assert_eq!(console.enter(&ticket)?.0, 200);
    let Answer(status, _, body) = console.enter(&ticket)?;
    assert!(status == 401 && body.contains("used already"), "{body}");
    for nonsense in ["", "x", &"f".repeat(64)] {
        assert_eq!(console.enter(nonsense)?.0, 401);
    }
    let kind = "Content-Type: application/json\r\n";
    for body in ["", "{}", "[", &format!("\"{}\"", "x".repeat(5000))] {
        let Answer(status, ..) = console.ask("POST", "/api/enter", kind, body)?;
        assert_eq!(status, 401, "{body:?}");
    }
    // Sessions end with the manager.
    let session = console.session()?;
    let mut console = console;
    console.vgpud.end(nix::sys::signal::Signal::SIGTERM)?;
    console.vgpud.start_again()?;
    let url = vgpuctl(&console.vgpud, "web")?;
    let address = url.strip_prefix("http://").and_then(|rest| rest.split_once('/'));
    console.address = address.context("An address")?.0.to_owned();
    let headers = format!("Authorization: Bearer {session}\r\n");
    assert_eq!(console.ask("GET", "/api/state/0/0", &headers, "")?.0, 401);
    Ok(())
}

#[test]
fn other_origins_and_host_names_are_refused() -> Result<()> {
    let console = Console::start()?;
    let session = console.session()?;
    let port = console.address.rsplit(':').next().context("A port")?;
    let bearer = format!("Authorization: Bearer {session}\r\n");
    let status = |headers: &str| -> Result<u16> {
        Ok(console.ask("GET", "/api/state/0/0", &format!("{bearer}{headers}"), "")?.0)
    };
    assert_eq!(status(&format!("Host: localhost:{port}\r\n"))?, 200);
    assert_eq!(status(&format!("Origin: http://{}\r\n", console.address))?, 200);
    for headers in [
        // A foreign host name that resolves to this address (DNS rebinding).
        format!("Host: evil.example:{port}\r\n"),
        format!("Host: evil.example:{port}\r\nOrigin: http://evil.example:{port}\r\n"),
        "Host: 127.0.0.1\r\n".to_owned(),
        "Origin: http://evil.example\r\n".to_owned(),
        "Origin: null\r\n".to_owned(),
        format!("Origin: http://localhost:{port}\r\n"),
    ] {
        let Answer(status, _, body) =
            console.ask("GET", "/api/state/0/0", &format!("{bearer}{headers}"), "")?;
        assert_eq!(status, 421, "{headers}");
        assert!(
            body.contains("accepts requests for its own address from its own page only"),
            "{body}"
        );
    }
    let Answer(status, _, body) = console.ask("GET", "/secrets", &bearer, "")?;
    assert!(status == 404 && body.contains("There is no such page in this console"), "{body}");
    Ok(())
}

#[test]
fn the_console_listens_on_loopback_only() -> Result<()> {
    for (address, words) in [
        ("0.0.0.0:8006", "0.0.0.0 is not a loopback address; give 127.0.0.1:8006"),
        ("8006", "give an address and a port, for example"),
    ] {
        let run =
            Command::new(vgpud()?).args(["run", "--web", address]).stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&run.stderr).into_owned();
        assert!(!run.status.success() && said.contains(words), "{said}");
    }
    let without = Vgpud::start()?;
    refused(&without, "web", 5, "start it with --web 127.0.0.1:8006")?;
    let console = Console::start()?;
    let unknown = "99999999-9999-4999-8999-999999999999";
    refused(&console.vgpud, &format!("web --monitor {unknown}=/x"), 4, "vgpuctl list")?;
    Ok(())
}
