#pragma once
#include "nowhere.h"
