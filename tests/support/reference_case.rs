//! Runs calls of attention and holds them against what the reference answers.

use super::{
    Array, AttentionCase, InvalidMetadata, Invocation, U8, assert_matches_expected, clamped_sequences, expected_rows,
    for_both_sides,
};

/// Asserts that results are what is allowed.
pub type Comparison<'a> = Box<dyn Fn(&[Array]) + 'a>;

/// A call of attention whose results the reference knows.
pub trait ReferenceCase {
    /// The attention that it computes, or differentiates.
    fn case(&self) -> &AttentionCase;

    fn case_mut(&mut self) -> &mut AttentionCase;

    fn call(&self) -> Invocation;

    /// What a call computes: the results up to one that was not asked for, or the workspace.
    fn computed<'a>(&self, results: &'a [Array]) -> &'a [Array] {
        let end = results.iter().position(|x| x.dtype == U8 || x.dims == [0]);
        &results[..end.unwrap_or(results.len())]
    }

    /// What is allowed of the call's results.
    fn comparison(&self, invalid_metadata: InvalidMetadata) -> Comparison<'_>;

    /// Two runs have the same bits.
    fn is_deterministic(&self) -> bool {
        true
    }

    /// Run against both guards; the results are what is allowed. Gives the results of both.
    fn compare_with_reference(&self, invalid_metadata: InvalidMetadata) -> [Vec<Array>; 2] {
        let (comparison, call, mut computed) = (self.comparison(invalid_metadata), self.call(), Vec::new());
        for_both_sides(|side| {
            let results = call.results(side);
            comparison(&results);
            computed.push(self.computed(&results).to_vec());
        });
        computed.try_into().unwrap()
    }

    /// The same of a call whose metadata is right throughout, from run to run.
    fn assert_matches_reference(&self) -> Vec<Array> {
        let case = self.case();
        assert!(
            clamped_sequences(case).iter().all(|m| m.specified || m.len_q == 0),
            "{}: not everything is checked",
            case.name
        );
        let [first, second] = self.compare_with_reference(InvalidMetadata::Unspecified);
        assert!(!self.is_deterministic() || first == second, "{}: two runs differ", case.name);
        first
    }
}

impl ReferenceCase for AttentionCase {
    fn case(&self) -> &AttentionCase {
        self
    }

    fn case_mut(&mut self) -> &mut AttentionCase {
        self
    }

    fn call(&self) -> Invocation {
        self.invocation()
    }

    fn comparison(&self, invalid_metadata: InvalidMetadata) -> Comparison<'_> {
        let expected_rows = expected_rows(self, invalid_metadata);
        Box::new(move |actual| assert_matches_expected(self, &expected_rows, &actual[0], self.lse.then(|| &actual[1])))
    }
}

/// Check a call under a name of its own, to be found by when it fails.
pub fn assert_named_matches_reference(name: &str, call: &mut dyn ReferenceCase) -> Vec<Array> {
    call.case_mut().name = format!("{name}: {}", call.case().name);
    call.assert_matches_reference()
}
