//! Golden bytes of the protocol, and version negotiation.

use std::time::Duration;

use ipc::seqpacket::{MAX_PACKET, decode, encode};
use mdev_core::device::Scanout;
use mdev_core::gpu::{
    Backing, ChannelSpec, ClientSpec, EngineKind, MapRequest, Placement, Quotas, SavedChannel,
    ScreenStatus, Usage, UsageReport, Waits,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, SpaceId, VgpuId};
use mdev_core::sched::Budget;
use uuid::Uuid;

use super::*;

/// A change of these bytes is incompatible: raise [`OLDEST`]. An addition increments
/// [`VERSION`].
#[test]
fn bytes_of_version_1() {
    assert_eq!((OLDEST, VERSION), (1, 1));
    let vgpu = VgpuId(Uuid::from_u128(0x0102_0304));
    let admin = [
        (AdminRequest::Hello { version: 1 }, "0001"),
        (
            AdminRequest::Admit(ClientSpec {
                vgpu,
                vram_bytes: 1 << 30,
                framebuffer_bytes: 0,
                max_channels: 8,
                max_import_bytes: 1 << 20,
            }),
            "011000000000000000000000000001020304808080800400088080 40",
        ),
        (
            AdminRequest::SetTimeslice(vgpu, Duration::from_micros(1)),
            "03100000000000000000000000000102030400e807",
        ),
        (AdminRequest::Usage, "06"),
        (
            AdminRequest::SetBudget(vgpu, Some(Budget { time_ns: 1, period_ns: 2 })),
            "07 1000000000000000000000000001020304 01 01 02",
        ),
        (
            AdminRequest::SetQuotas(vgpu, Quotas { max_channels: Some(3), ..Quotas::default() }),
            "08 1000000000000000000000000001020304 00 0103 00 013c00 00",
        ),
    ];
    let admin = admin.into_iter().chain([
        (AdminRequest::Focus(vgpu), "09 1000000000000000000000000001020304"),
        (AdminRequest::Rotate(Some(Duration::from_secs(10))), "0a 01 0a 00"),
        (AdminRequest::Screen, "0b"),
        (AdminRequest::Forget(vgpu), "0c 1000000000000000000000000001020304"),
        (AdminRequest::Waits(vec![vgpu]), "0d 01 1000000000000000000000000001020304"),
        (
            AdminRequest::AdmitContext(ClientSpec {
                vgpu,
                vram_bytes: 1 << 30,
                framebuffer_bytes: 0,
                max_channels: 8,
                max_import_bytes: 1 << 20,
            }),
            "0e 1000000000000000000000000001020304 8080808004 00 08 808040",
        ),
    ]);
    for (message, bytes) in admin {
        assert_eq!(hex(&encode(&message).unwrap()), bytes.replace(' ', ""), "{message:?}");
    }
    check_client_requests();
    let numbered = Numbered { number: 300, recorded: 2, body: ClientRequest::Reset };
    assert_eq!(hex(&encode(&numbered).unwrap()), "ac02 02 0b".replace(' ', ""));
    assert_eq!(hex(&encode(&ClientReply::Refused(Refusal::Os(5))).unwrap()), "06190a");
    let fragmented = Refusal::Fragmented { wanted_mib: 8, outlived_mib: 16 };
    assert_eq!(hex(&encode(&ClientReply::Refused(fragmented)).unwrap()), "061b0810");
    assert_eq!(hex(&encode(&ClientReply::Refused(Refusal::Group)).unwrap()), "061e");
    assert_eq!(hex(&encode(&ClientReply::Refused(Refusal::State)).unwrap()), "0620");
    assert_eq!(hex(&encode(&ClientReply::SpaceCreated(SpaceId(3))).unwrap()), "0803");
    assert_eq!(hex(&encode(&ClientReply::Saved).unwrap()), "09");
    assert_eq!(hex(&encode(&ClientReply::Logged).unwrap()), "0a");
    let renewed = ClientReply::Renewed { vram_offset: Some(5) };
    assert_eq!(hex(&encode(&renewed).unwrap()), "070105");
    let screen = ScreenStatus { focus: Some(vgpu), rotation: None };
    let bytes = "06 01 1000000000000000000000000001020304 00";
    assert_eq!(hex(&encode(&AdminReply::Screen(screen)).unwrap()), bytes.replace(' ', ""));
    check_usage(vgpu);
}

fn check_usage(vgpu: VgpuId) {
    let mut usage = Usage { copy_ns: 1, compute_ns: 2, channels: 3, ..Usage::default() };
    usage.waits.record(1_000_000);
    let fields = "00 01 02 0000000000000000 0000000000000000 03".replace(' ', "");
    let bytes = encode(&ClientReply::Usage(Box::new(WithoutWaits(usage)))).unwrap();
    assert_eq!(hex(&bytes), format!("05{fields}"));
    let without = Usage { waits: Waits::default(), ..usage };
    assert_eq!(
        decode::<ClientReply>(&bytes).unwrap(),
        ClientReply::Usage(Box::new(WithoutWaits(without))),
        "the waits have a request of their own"
    );
    let report = UsageReport { now_ns: 5, vgpus: vec![(vgpu, usage)] };
    let bytes = encode(&AdminReply::Usage(report.into())).unwrap();
    assert_eq!(
        hex(&bytes),
        format!("03 05 01 1000000000000000000000000001020304 {fields}").replace(' ', "")
    );
    let mut counts = [0; Waits::BUCKETS];
    (counts[1], counts[Waits::BUCKETS - 1]) = (300, 1);
    let waits = AdminReply::Waits(vec![(vgpu, Waits::from_counts(counts))]);
    let zeros = "00".repeat(Waits::BUCKETS - 3);
    let bytes = format!("07 01 1000000000000000000000000001020304 00 ac02 {zeros} 01");
    assert_eq!(hex(&encode(&waits).unwrap()), bytes.replace(' ', ""));
}

#[test]
fn the_largest_replies_fit_into_a_packet() {
    let vgpu = VgpuId(Uuid::from_u128(u128::MAX));
    let waits = Waits::from_counts([u32::MAX; Waits::BUCKETS]);
    let reply = AdminReply::Waits(vec![(vgpu, waits); MAX_WAITS]);
    assert!(encode(&reply).unwrap().len() <= MAX_PACKET);
    let most = u64::MAX;
    let usage = Usage {
        busy_groups: 0,
        engine_ns: most,
        copy_ns: most,
        compute_ns: most,
        wait_ns: most,
        gated_ns: most,
        gate_closings: most,
        gate_cost_ns: most,
        submissions: most,
        polled_doorbells: most,
        wakeups: most,
        preemptions: most,
        slice_overruns: most,
        overrun_ns: most,
        stolen_ns: most,
        faults: most,
        hang_resets: most,
        throttled: most,
        runnable: true,
        imported_bytes: most,
        channels: u32::MAX,
        waits,
    };
    // The largest number of vGPUs of a parent with partitions.
    let report = UsageReport { now_ns: most, vgpus: vec![(vgpu, usage); 256] };
    assert!(encode(&AdminReply::Usage(report.into())).unwrap().len() <= MAX_PACKET);
}

fn check_client_requests() {
    let map = MapRequest::new(GpuVa(0x2_0000_0000), 4096, Backing::Vram { offset: 0 });
    let map = map.in_space(SpaceId(2)).read_only();
    let channel = ChannelSpec {
        engine: EngineKind::Compute,
        gpfifo: GpuVa(0x1000),
        gpfifo_entries: 64,
        userd: Backing::Guest { memory: MemoryId(3), offset: 512 },
        vector: 1,
        space: SpaceId(2),
        group: Some(5),
        placement: Placement::default(),
        preamble: None,
    };
    let scanout = Scanout {
        enabled: true,
        width: 640,
        height: 480,
        stride: 2560,
        bits_per_pixel: 32,
        offset: 4096,
        big_endian: false,
    };
    let saved = SavedChannel { id: ChannelId(7), spec: channel, state: vec![1, 2] };
    let client = [
        (ClientRequest::Hello { version: 1, adopts: true }, "00 01 01"),
        (ClientRequest::Import { offset: 0, len: 4096, writable: true }, "01 00 8020 01"),
        (ClientRequest::CreateSpace, "03"),
        (ClientRequest::DestroySpace(SpaceId(2)), "04 02"),
        (ClientRequest::Map(map), "05 02 8080808020 8020 0100 00"),
        (
            ClientRequest::Unmap { space: SpaceId(2), va: map.va, len: 4096 },
            "06 02 8080808020 8020",
        ),
        (ClientRequest::CreateChannel(channel), "07 0180204000 0380 0401 02 0105"),
        (ClientRequest::SetScanout(scanout), "0d 01 8005 e003 8014 20 8020 00"),
        (ClientRequest::Scrub, "0e"),
        (ClientRequest::Renew, "0f"),
        (ClientRequest::Pause, "10"),
        (ClientRequest::Resume, "11"),
        (ClientRequest::Save, "12"),
        (ClientRequest::RestoreSpace(SpaceId(2)), "13 02"),
        (ClientRequest::RestoreChannel(saved), "14 07 0180204000 0380 0401 02 0105 02 0102"),
        (ClientRequest::LogWrites(MemoryId(7)), "15 07"),
        (ClientRequest::EndLog(MemoryId(7)), "16 07"),
    ];
    for (message, bytes) in client {
        assert_eq!(hex(&encode(&message).unwrap()), bytes.replace(' ', ""), "{message:?}");
    }
}

#[test]
fn the_older_version_is_negotiated() {
    assert_eq!((agreed(VERSION), agreed(OLDEST), agreed(VERSION + 1)), (VERSION, OLDEST, VERSION));
    assert_eq!(agreed(OLDEST - 1), VERSION, "the client refuses it");
    assert!(is_spoken(OLDEST) && is_spoken(VERSION));
    assert!(!is_spoken(OLDEST - 1) && !is_spoken(VERSION + 1));
}

#[test]
fn garbage_is_refused() {
    assert!(decode::<ClientRequest>(&[0xff; 8]).is_err());
    assert!(decode::<AdminRequest>(&[]).is_err());
    assert!(decode::<AdminRequest>(&[6, 0]).is_err(), "trailing byte");
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
