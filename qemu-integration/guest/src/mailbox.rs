//! Typed requests to the control interface.

use mdev_core::abi::control::reg;
use mdev_core::abi::mailbox::{
    ChannelCreate, ChannelCreated, ChannelName, ChannelState, Header, Info, MAP_READ_ONLY,
    MAX_SCATTER, MapGuest, MapVram, Opcode, PAGE_BYTES, PAYLOAD, Scatter, Status, Unmap,
};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::GuestError;
use crate::platform::{GuestPages, Platform};

/// Page that holds requests and responses.
#[derive(Debug)]
pub struct Mailbox(GuestPages);

impl Mailbox {
    /// Allocates the request page.
    pub fn new(platform: &dyn Platform) -> Result<Self, GuestError> {
        Ok(Self(platform.allocate(PAGE_BYTES as u64)?))
    }

    /// Queries the vGPU's properties.
    pub fn info(&self, platform: &dyn Platform) -> Result<Info, GuestError> {
        self.request(platform, "GetInfo", Opcode::GetInfo, &[])
    }

    /// Maps guest memory at `va`. Long lists take several requests; a failure leaves nothing
    /// mapped.
    pub fn map_guest(
        &self,
        platform: &dyn Platform,
        va: u64,
        ranges: &[Scatter],
        writable: bool,
    ) -> Result<(), GuestError> {
        let flags = if writable { 0 } else { MAP_READ_ONLY };
        let mut at = va;
        for part in ranges.chunks(MAX_SCATTER) {
            let head = MapGuest { va: at, flags, count: part.len() as u32 };
            let payload = [head.as_bytes(), part.as_bytes()].concat();
            let answer = self.request::<()>(platform, "MapGuest", Opcode::MapGuest, &payload);
            if answer.is_err() && at > va {
                self.unmap(platform, va, at - va)?;
            }
            answer?;
            at += part.iter().map(|range| range.length).sum::<u64>();
        }
        Ok(())
    }

    /// Maps video memory at `va`.
    pub fn map_vram(
        &self,
        platform: &dyn Platform,
        va: u64,
        offset: u64,
        length: u64,
    ) -> Result<(), GuestError> {
        let payload = MapVram { va, offset, length, flags: 0, reserved: 0 };
        self.request(platform, "MapVram", Opcode::MapVram, payload.as_bytes())
    }

    /// Unmaps a range.
    pub fn unmap(&self, platform: &dyn Platform, va: u64, length: u64) -> Result<(), GuestError> {
        self.request(platform, "Unmap", Opcode::Unmap, Unmap { va, length }.as_bytes())
    }

    /// Creates a channel.
    pub fn create_channel(
        &self,
        platform: &dyn Platform,
        create: &ChannelCreate,
    ) -> Result<ChannelCreated, GuestError> {
        let request = |payload: &[u8]| {
            self.request(platform, "ChannelCreate", Opcode::ChannelCreate, payload)
        };
        match request(create.as_bytes()) {
            // Earlier versions of the device know no preamble.
            Err(GuestError::Refused { status: Status::Invalid, .. }) => {
                request(&create.as_bytes()[..ChannelCreate::SHORT_BYTES])
            }
            created => created,
        }
    }

    /// Queries a channel's state.
    pub fn query_channel(
        &self,
        platform: &dyn Platform,
        channel: u32,
    ) -> Result<ChannelState, GuestError> {
        let name = ChannelName { channel, reserved: 0 };
        self.request(platform, "ChannelQuery", Opcode::ChannelQuery, name.as_bytes())
    }

    /// Destroys a channel.
    pub fn destroy_channel(&self, platform: &dyn Platform, channel: u32) -> Result<(), GuestError> {
        let name = ChannelName { channel, reserved: 0 };
        self.request(platform, "ChannelDestroy", Opcode::ChannelDestroy, name.as_bytes())
    }

    /// Destroys all channels and removes all mappings.
    pub fn reset(&self, platform: &dyn Platform) -> Result<(), GuestError> {
        self.request(platform, "Reset", Opcode::Reset, &[])
    }

    fn request<R: FromBytes + FromZeros + IntoBytes + Immutable>(
        &self,
        platform: &dyn Platform,
        name: &'static str,
        opcode: Opcode,
        payload: &[u8],
    ) -> Result<R, GuestError> {
        let page = self.0.window();
        let header = Header {
            opcode: opcode as u32,
            status: Status::Internal as u32,
            request_bytes: payload.len() as u32,
            ..Header::default()
        };
        page.write(0, header.as_bytes());
        page.write(PAYLOAD as u64, payload);
        let address = self.0.ranges()[0].address;
        platform.write32(reg::MAILBOX_LO, address as u32);
        platform.write32(reg::MAILBOX_HI, (address >> 32) as u32);
        platform.write32(reg::MAILBOX_DOORBELL, 1);
        // Check the register first: the device writes no status if it cannot access the page.
        match platform.read32(reg::MAILBOX_STATUS) {
            u32::MAX => return Err(GuestError::Lost),
            number => accept(name, Status::from_number(number))?,
        }
        let mut header = Header::default();
        page.read(0, header.as_mut_bytes());
        accept(name, Status::from_number(header.status))?;
        if (header.reply_bytes as usize) < size_of::<R>() {
            return Err(GuestError::Refused { request: name, status: Status::Internal });
        }
        let mut reply = R::new_zeroed();
        page.read(PAYLOAD as u64, reply.as_mut_bytes());
        Ok(reply)
    }
}

fn accept(request: &'static str, status: Status) -> Result<(), GuestError> {
    match status {
        Status::Ok => Ok(()),
        Status::DeviceLost => Err(GuestError::Lost),
        status => Err(GuestError::Refused { request, status }),
    }
}
