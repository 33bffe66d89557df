// The class Backend and the params of every op, for programs without Torch that call a backend library with raw
// pointers.
#pragma once

#include "core/attention.h"
#include "core/best_first.h"
#include "core/drafting.h"
#include "core/kv_cache.h"
#include "core/logprobs.h"
#include "core/ngram.h"
#include "core/ops.h"
#include "core/recurrent.h"
#include "core/sampling.h"
#include "core/select_nodes.h"
#include "core/step.h"
#include "core/tree.h"
#include "core/verify/rules.h"
#include "core/verify/shard_distributions.h"
