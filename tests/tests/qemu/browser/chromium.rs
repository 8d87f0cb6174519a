//! Headless Chromium, driven through its DevTools protocol on a pipe.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use lab::viewers::Viewers;
use serde_json::{Value, json};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(60);

/// A browser with one page.
pub struct Chromium {
    child: Child,
    writer: ChildStdin,
    messages: Receiver<Value>,
    number: u64,
    session: String,
    /// Errors of the page and complaints of the browser.
    pub errors: VecDeque<String>,
    _profile: TempDir,
}

impl Chromium {
    /// Starts a browser with an empty page of this size.
    pub fn start(viewers: &Viewers, width: u32, height: u32) -> Result<Self> {
        let profile = tempfile::tempdir()?;
        let chromium = viewers.chromium(profile.path());
        // Chromium reads commands from descriptor 3 and answers on 4.
        let mut command = Command::new("sh");
        command.args(["-c", r#"exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1"#, "sh"]);
        command.arg(chromium.get_program()).args(chromium.get_args());
        command.arg("--remote-debugging-pipe");
        for (name, value) in chromium.get_envs() {
            command.env(name, value.unwrap_or_default());
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let writer = child.stdin.take().context("A pipe")?;
        let reader = child.stdout.take().context("A pipe")?;
        let (sender, messages) = mpsc::channel();
        std::thread::spawn(move || {
            for message in BufReader::new(reader).split(0).map_while(std::result::Result::ok) {
                let Ok(message) = serde_json::from_slice(&message) else { continue };
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let mut browser = Self {
            child,
            writer,
            messages,
            number: 0,
            session: String::new(),
            errors: VecDeque::new(),
            _profile: profile,
        };
        let page = browser.call("Target.createTarget", &json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": page["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", &attach)?;
        session["sessionId"].as_str().context("A session")?.clone_into(&mut browser.session);
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), &json!({}))?;
        }
        let size =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        browser.call("Emulation.setDeviceMetricsOverride", &size)?;
        Ok(browser)
    }

    /// Runs a command of the protocol.
    pub fn call(&mut self, method: &str, params: &Value) -> Result<Value> {
        self.number += 1;
        let mut command = json!({ "id": self.number, "method": method, "params": params });
        if !self.session.is_empty() {
            command["sessionId"] = json!(self.session);
        }
        let mut bytes = command.to_string().into_bytes();
        bytes.push(0);
        self.writer.write_all(&bytes)?;
        let deadline = Instant::now() + LIMIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(mut message) = self.messages.recv_timeout(left) else {
                bail!("The browser does not answer {method}");
            };
            if message["id"] == self.number {
                ensure!(message["error"].is_null(), "{method}: {}", message["error"]);
                return Ok(message["result"].take());
            }
            self.note(&message);
        }
    }

    fn note(&mut self, message: &Value) {
        let params = &message["params"];
        let bad = match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => params["type"] == "error",
            Some("Log.entryAdded") => params["entry"]["level"] == "error",
            _ => false,
        };
        if bad {
            self.errors.push_back(params.to_string());
        }
    }

    /// Navigates to an address.
    pub fn open(&mut self, url: &str) -> Result<()> {
        self.call("Page.navigate", &json!({ "url": url })).map(drop)
    }

    /// Evaluates an expression on the page; awaits promises.
    pub fn eval(&mut self, expression: &str) -> Result<Value> {
        let params =
            json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let mut result = self.call("Runtime.evaluate", &params)?;
        ensure!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        Ok(result["result"]["value"].take())
    }

    /// Waits until an expression is true on the page.
    pub fn until(&mut self, expression: &str) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        // During navigation there is no page to ask.
        while !matches!(self.eval(expression), Ok(Value::Bool(true))) {
            if Instant::now() > deadline {
                let text = self.eval("document.body.innerText").unwrap_or_default();
                bail!("Never: {expression}; errors: {:?}; the page: {text}", self.errors);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Clicks in the middle of an element with mouse events.
    pub fn click(&mut self, selector: &str) -> Result<()> {
        let at = self.eval(&format!(
            "(() => {{ const e = document.querySelector({selector:?}); e.scrollIntoView({{ block: 'center' }});
               const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; }})()"
        ))?;
        for kind in ["mouseMoved", "mousePressed", "mouseReleased"] {
            let buttons = i32::from(kind == "mousePressed");
            let params = json!({
                "type": kind, "x": at[0], "y": at[1], "button": "left", "buttons": buttons, "clickCount": 1,
            });
            self.call("Input.dispatchMouseEvent", &params)?;
        }
        Ok(())
    }

    /// Presses and releases a key.
    pub fn key(&mut self, code: &str, key: &str) -> Result<()> {
        for kind in ["rawKeyDown", "keyUp"] {
            self.call(
                "Input.dispatchKeyEvent",
                &json!({ "type": kind, "code": code, "key": key }),
            )?;
        }
        Ok(())
    }

    /// Returns a screenshot of the page.
    pub fn picture(&mut self) -> Result<Vec<u8>> {
        let picture = self.call("Page.captureScreenshot", &json!({ "format": "png" }))?;
        Ok(STANDARD.decode(picture["data"].as_str().context("A picture")?)?)
    }

    /// Selects the dark or the light colour scheme.
    pub fn scheme(&mut self, scheme: &str) -> Result<()> {
        let feature = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.call("Emulation.setEmulatedMedia", &json!({ "features": feature })).map(drop)
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        let _ = self.call("Browser.close", &json!({}));
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
