#pragma once
#include "test/piece.h"
