//! The format that `pprof` and other viewers of profiles read: `profile.proto` of github.com/google/pprof, as far as
//! samples with stacks of named functions need it.

use std::collections::BTreeMap;

use prost::Message;

/// Samples of one kind for each stack, outermost frame first.
pub(super) type Stacks = BTreeMap<Vec<String>, Vec<i64>>;

#[derive(Message)]
struct Profile {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<Sample>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
}

#[derive(Message)]
struct ValueType {
    #[prost(int64, tag = "1")]
    kind: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

#[derive(Message)]
struct Sample {
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
}

#[derive(Message)]
struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<Line>,
}

#[derive(Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    function_id: u64,
}

#[derive(Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
}

/// Returns the file of a profile with a value for each of `kinds` in each stack.
pub(super) fn encode(kinds: &[String], stacks: &Stacks) -> Vec<u8> {
    // String 0 is empty, as the format has it.
    let mut strings = vec![String::new()];
    let mut places: BTreeMap<String, i64> = BTreeMap::new();
    let mut string = |text: &str| {
        *places.entry(text.to_owned()).or_insert_with(|| {
            strings.push(text.to_owned());
            strings.len() as i64 - 1
        })
    };
    let unit = string("samples");
    let sample_type = kinds
        .iter()
        .map(|kind| ValueType {
            kind: string(kind),
            unit,
        })
        .collect();
    let names: std::collections::BTreeSet<&String> = stacks.keys().flatten().collect();
    let ids: BTreeMap<&String, u64> = names.into_iter().zip(1..).collect();
    let function = ids
        .iter()
        .map(|(name, &id)| Function {
            id,
            name: string(name),
        })
        .collect();
    let location = ids.values().map(|&id| Location {
        id,
        line: vec![Line { function_id: id }],
    });
    let sample = stacks.iter().map(|(stack, values)| Sample {
        // The innermost frame comes first.
        location_id: stack.iter().rev().map(|frame| ids[frame]).collect(),
        value: values.clone(),
    });
    Profile {
        sample_type,
        sample: sample.collect(),
        location: location.collect(),
        function,
        string_table: strings,
    }
    .encode_to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_named_from_the_inside() {
        let stack = ["guest", "pid 1", "foo"].map(str::to_owned).to_vec();
        let file = encode(&["cycles".to_owned()], &Stacks::from([(stack, vec![7])]));
        let profile = Profile::decode(file.as_slice()).unwrap();
        let name = |id: &u64| {
            let function = profile.function.iter().find(|function| function.id == *id);
            profile.string_table[function.unwrap().name as usize].as_str()
        };
        let names: Vec<_> = profile.sample[0].location_id.iter().map(name).collect();
        assert_eq!(names, ["foo", "pid 1", "guest"]);
        assert_eq!(profile.sample[0].value, [7]);
        assert_eq!(profile.string_table[0], "");
        assert_eq!(
            profile.string_table[profile.sample_type[0].kind as usize],
            "cycles"
        );
    }
}
