//! Accesses as a virtual CPU of QEMU makes them: one at a time.

use crate::raw_client::RawClient;

/// Virtual CPU of a VM whose workers may die.
#[derive(Debug)]
pub struct Vcpu(RawClient);

impl Vcpu {
    /// Takes a connection.
    pub fn new(client: RawClient) -> Self {
        Self(client)
    }

    /// Makes an access that must succeed, and returns the reply's data.
    ///
    /// As in QEMU, replies without data that nothing waits for are dropped, and a request of the
    /// server is answered once no access waits.
    ///
    /// # Panics
    ///
    /// Panics if the connection is closed, the access fails, or a reply comes twice with data.
    pub fn access(&mut self, command: u16, payload: &[u8]) -> Vec<u8> {
        let id = self.0.send(command, 0, payload, &[]);
        let data = loop {
            let reply = self.0.receive().unwrap_or_else(|| panic!("the connection is closed"));
            if reply.flags.trailing_zeros() >= 4 {
                self.0.requests.push_back(reply);
            } else if reply.id != id {
                assert!(reply.payload.is_empty(), "a second reply with data: {reply:?}");
            } else {
                assert_eq!(reply.error, 0);
                break reply.payload;
            }
        };
        while let Some(question) = self.0.requests.pop_front() {
            self.0.refuse(&question, libc::ENOSYS);
        }
        data
    }
}
