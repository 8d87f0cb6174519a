//! Whatever a saved state says: it is taken as a whole, and then is what the function saves, or it
//! is refused and nothing has changed. Either way the function works on.
#![no_main]

use fuzz::input::Input;
use libfuzzer_sys::fuzz_target;
use mdev_core::device::{DisplayLimits, FunctionSpec, REGIONS, SavedFunction, VirtualFunction};
use mdev_core::ids::VgpuId;
use mdev_core::testing::Recorder;
use serde_json::Value;

/// Every value in a document that is no object.
fn leaves<'a>(value: &'a mut Value, found: &mut Vec<&'a mut Value>) {
    match value {
        Value::Object(fields) => fields.values_mut().for_each(|field| leaves(field, found)),
        leaf => found.push(leaf),
    }
}

fn work(function: &mut VirtualFunction) {
    for region in 0..REGIONS {
        for offset in (0..0x700).step_by(0x24) {
            let mut data = [0; 8];
            let _ = function.region_read(region, offset, &mut data);
            let _ = function.region_write(region, offset, &data);
        }
    }
    let _ = (function.scanout(), function.warnings(), function.vram());
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let display = DisplayLimits { max_width: 800, max_height: 600 };
    let spec = FunctionSpec {
        vgpu: VgpuId(uuid::Uuid::from_u128(7)),
        type_name: "FUZZ-8MQ".into(),
        display: (input.byte() & 1 == 0).then_some(display),
        doorbell_mapped: true,
    };
    let mut function = VirtualFunction::new(&spec, Recorder::new().0).expect("a function");
    let before = function.save();
    let state: Option<SavedFunction> = if input.byte() & 7 == 0 {
        serde_json::from_slice(input.bytes(4096)).ok()
    } else {
        let mut document = serde_json::to_value(&before).expect("JSON");
        for _ in 0..16 {
            if input.is_empty() {
                break;
            }
            let mut found = Vec::new();
            leaves(&mut document, &mut found);
            let count = found.len().max(1);
            let Some(leaf) = found.into_iter().nth(usize::from(input.byte()) % count) else {
                break;
            };
            *leaf = input.number().into();
        }
        serde_json::from_value(document).ok()
    };
    let Some(state) = state else { return };
    match function.restore(&state) {
        Ok(()) => assert_eq!(function.save(), state, "what was restored is what is saved"),
        Err(_) => assert_eq!(function.save(), before, "a refusal has changed something"),
    }
    work(&mut function);
    assert_eq!(function.restore(&before), Ok(()), "what was saved restores");
    assert_eq!(function.save(), before);
});
